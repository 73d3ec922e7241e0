"""New adapters into the live weights of a model, in place: all of them or none.

What runs is live = base + alpha / rank * B A, computed from the base each time, so that nothing adds up from version to
version. Of the layers that have adapters, the base is kept a second time.
"""

from typing import Any

import torch

from async_rl.errors import PublicationError
from async_rl.services.rollout.adapters import layers
from async_rl.services.rollout.engine import Weights
from async_rl.services.rollout.live_weights import LiveWeights


class LiveAdapters(LiveWeights):
    """`model` is the base now."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._live.items()}
        self._base: dict[str, torch.Tensor] = {}  # of the layers that have adapters, as they were

    def load(self, weights: Weights) -> None:
        """Merge the adapters `weights` into the model. PublicationError, with nothing written, where they do not
        fit it."""
        found = layers(weights.manifest, self._shapes)
        if self._base and found.keys() != self._base.keys():
            other = min(found.keys() ^ self._base.keys())
            raise PublicationError(f"version {weights.version} of the weights: {other} has an adapter now and then")
        lora, named = weights.manifest.lora, dict(weights.tensors())
        assert lora is not None
        if not self._base:
            self._base = {name: self._live[name].detach().clone() for name in found}
        with torch.no_grad():
            for name, (a, b) in found.items():
                self._live[name].copy_(merged(self._base[name], named[a], named[b], lora.alpha / lora.rank))


def merged(base: torch.Tensor, a: Any, b: Any, scale: float) -> torch.Tensor:
    """base [out, in] + scale * b [out, rank] @ a [rank, in], in float32 at least."""
    dtype = torch.promote_types(base.dtype, torch.float32)
    a, b = a.to(base.device, dtype), b.to(base.device, dtype)
    return torch.addmm(base.to(dtype), b, a, alpha=scale)
