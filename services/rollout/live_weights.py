"""New weights into the live parameters of a model, in place: all of them or none."""

from typing import Any

import torch
import xxhash

from async_rl.errors import PublicationError
from async_rl.services.rollout.engine import Weights


class LiveWeights:
    """The parameters and persistent buffers of `model`, by every name they have.

    Tied tensors have several names and one storage: writing under any of them covers all.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._live: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._required = {name for name, _ in model.named_parameters()}

    def load(self, weights: Weights) -> None:
        """Copy `weights` into the model. PublicationError, with nothing written, where they do not fit it."""
        plan = self._plan(dict(weights.tensors()), weights)
        with torch.no_grad():
            for live, fresh in plan:
                live.copy_(fresh)

    def checksums(self) -> dict[str, int]:
        """xxh3_64 of each parameter's bytes, tied ones under their first name."""
        return {name: checksum(self._live[name]) for name in sorted(self._required)}

    def _plan(self, fresh: dict[str, torch.Tensor], weights: Weights) -> list[tuple[torch.Tensor, torch.Tensor]]:
        where = f"version {weights.version} of the weights"
        named = fresh | {alias: fresh[name] for alias, name in weights.aliases.items() if name in fresh}
        unknown = sorted(named.keys() - self._live.keys())
        if unknown:
            raise PublicationError(f"{where}: the model has no {unknown[0]} ({len(unknown)} unknown names)")
        sources: dict[int, tuple[str, torch.Tensor]] = {}  # by the live storage they go to
        plan = []
        for name, tensor in named.items():
            live = self._live[name]
            if live.shape != tensor.shape:
                raise PublicationError(f"{where}: {name} is {list(tensor.shape)}, the model's {list(live.shape)}")
            first, source = sources.setdefault(live.data_ptr(), (name, tensor))
            if first == name:
                plan.append((live, tensor))
            elif source is not tensor and not torch.equal(source, tensor):
                raise PublicationError(f"{where}: {first} and {name} differ, and the model ties them")
        missing = sorted(n for n in self._required if self._live[n].data_ptr() not in sources)
        if missing:
            raise PublicationError(f"{where}: {missing[0]} is not among them ({len(missing)} names missing)")
        return plan


def checksum(tensor: torch.Tensor) -> int:
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(flat)
