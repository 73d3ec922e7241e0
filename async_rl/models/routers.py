"""The routers of a mixture of experts, of the forms that transformers has.

A router gives (logits [T, E], weights [T, k], chosen [T, k]): the experts of each token and what their outputs are
weighed by. How weights follow from the logits and a choice, whoever made it, is what tells the forms apart.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from async_rl.errors import UserError
from async_rl.models.load import without_weights

SOFTMAX = {
    *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3VLMoeTextTopKRouter"),
    *("Qwen3_5MoeTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter", "MixtralTopKRouter", "MiniMaxTopKRouter"),
}
SIGMOID = {
    *("DeepseekV3TopkRouter", "Dots1TopkRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter"),
    *("ExaoneMoeTopkRouter", "SolarOpenTopkRouter"),
}
CHOSEN = {"GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter"}
KNOWN = SOFTMAX | SIGMOID | CHOSEN


def routers(model: Any) -> dict[str, Any]:
    """The routers of `model` by name, in the order of its layers. UserError where it has none, or unknown ones."""
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in KNOWN}
    if not found:
        unknown = sorted(
            {type(m).__name__ for m in model.modules() if type(m).__name__.lower().endswith(("router", "gate"))}
        )
        why = f"its routers, {', '.join(unknown)}, are of no known form" if unknown else "it has no experts"
        raise UserError(f"trainer.router_replay = true: the routing of a {type(model).__name__} cannot be kept: {why}")
    return found


class Layout(NamedTuple):
    """Where a model has experts."""

    layers: int  # of the model
    routed: list[int]  # those with experts, in order
    experts: int  # in each of these
    per_token: int  # of them


def layout(folder: Path) -> Layout:
    """Of the model in `folder`, without its weights. UserError as `routers`."""
    model = without_weights(folder)
    found = routers(model)
    router = next(iter(found.values()))
    routed = [int(re.findall(r"\.layers\.(\d+)\.", name)[-1]) for name in found]
    return Layout(model.config.get_text_config().num_hidden_layers, routed, experts(router), int(router.top_k))


def experts(router: Any) -> int:
    """How many a router chooses from."""
    return int(router.weight.shape[0])


def weights_of(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """[T, k] of the experts `chosen` [T, k], from the router's `logits` [T, E], which carry the gradient."""
    kind = type(router).__name__
    if kind in CHOSEN:
        return torch.softmax(logits.gather(1, chosen), dim=-1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if kind in SIGMOID:
        weights, least, scale = scores.sigmoid().gather(1, chosen), 1e-20, float(router.routed_scaling_factor)
    else:
        weights, least, scale = torch.softmax(scores, dim=-1).gather(1, chosen), 0.0, 1.0
    if getattr(router, "norm_topk_prob", True):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return weights * scale
