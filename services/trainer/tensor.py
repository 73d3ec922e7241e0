"""Matrices over ranks (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053), by DTensor, as the plan of transformers
for the model says: heads and the MLP's width are cut, all else is the same on each of these ranks."""

import re
from typing import Any

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from async_rl.errors import UserError

CUT: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"
"""Of a module which is whole on each rank and sees the rank's heads alone (the norms of queries and keys): so does its
gradient, which is the sum over the ranks."""


def cut(model: Any, mesh: Any) -> None:
    """Cut the layers of `model` over the ranks of `mesh` [n]. UserError where its plan or its sizes do not allow it."""
    styles = planned(model)
    require_divisible(model, mesh.size())
    parallelize_module(model, mesh, {name: CUT[style]() for name, style in styles.items() if style in CUT})


def partial_parameters(model: Any) -> list[Any]:
    """Those whose gradients are to be summed over the ranks."""
    return [
        parameter
        for name, style in planned(model).items()
        if style == PARTIAL
        for parameter in model.get_submodule(name).parameters()
    ]


def planned(model: Any) -> dict[str, str]:
    """Modules of the layers of `model` and what becomes of them; embeddings and head, which may be one, stay whole."""
    plan: dict[str, str] = {k: v for k, v in (getattr(model, "_tp_plan", None) or {}).items() if ".layers." in k}
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    found = {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }
    unknown = sorted({style for style in found.values() if style != PARTIAL and style not in CUT})
    if unknown or not found:
        why = f"a plan with {', '.join(unknown)}" if unknown else "no plan"
        raise UserError(f"trainer.tensor_parallel: {type(model).__name__} has {why} in transformers; leave it at 1")
    return found


def require_divisible(model: Any, ranks: int) -> None:
    config = model.config.get_text_config()
    sizes = {name: getattr(config, name, ranks) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes["intermediate_size"] = config.intermediate_size
    able = [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
    if ranks not in able:
        raise UserError(f"trainer.tensor_parallel = {ranks} does not divide {sizes} of the model; one of {able}")
