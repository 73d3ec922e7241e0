"""A model over the ranks of a trainer, by FSDP2 (`fully_shard`): each holds a part of every tensor, has a layer whole
while that layer computes, and gets the gradient of its parts summed over all ranks."""

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from async_rl.config.schema import Config
from async_rl.services.trainer.ranks import DATA, SEQUENCE, Ranks
from async_rl.services.trainer.tensor import cut


def prepare(model: Any, config: Config, ranks: Ranks) -> None:
    """Set `model` up as the trainer's settings ask: activations made again, precision, parts on the ranks."""
    settings, blocks = config.trainer, layers(model)
    if settings.recompute:
        for block in blocks:  # inside of what FSDP hangs on a layer, which then gathers it once in a backward pass
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    if ranks.mesh is None:
        return
    if ranks.tensor is not None:
        cut(model, ranks.tensor)
    on_host = ranks.mesh.device_type == "cpu"
    how: dict[str, Any] = {
        "mesh": ranks.mesh[DATA] if ranks.sequence is None else ranks.mesh[DATA, SEQUENCE]._flatten("shards"),
        "mp_policy": MixedPrecisionPolicy()
        if settings.dtype is None
        else MixedPrecisionPolicy(getattr(torch, config.model.dtype), torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=not on_host) if settings.offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(model, reshard_after_forward=False, **how)  # logits in parts use the head again and again
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the losses have the denominator of the whole update already
            module.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # an expert that no token of this rank went to


def layers(model: Any) -> list[Any]:
    """Those that transformers never splits over devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def computing_device(model: Any, ranks: Ranks) -> torch.device:
    """Where passes of `model` happen, wherever its weights lie between them."""
    if ranks.mesh is None:
        return torch.device(model.device)
    kind = ranks.mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def gathered_no_more(model: Any) -> None:
    """Frees what a pass without a backward pass has left gathered, and which would go stale with the next update."""
    if isinstance(model, FSDPModule):
        model.reshard()
