"""Router replay (Ma et al. 2025, arXiv:2510.11370): the trainer's forward pass goes through the experts that the
sampler's routers chose.

Small differences between sampler and trainer flip a router's choice between two experts that are nearly equal, and
another expert's output is no small difference. With the sampler's choice given, the weights of the experts are still
those of the trainer's own router, so its gradient is there.

    model(routing=...) -> layer -> attention    hears what its layer's router is told
                                -> router       its choice is replaced where one is given

`routing` goes the way of `expand` and `collapse`, and so it is there again when a layer is computed a second time for
the backward pass. The layer itself is no place to hear it: then only what is inside of it is called again.
"""

from typing import Any

import torch
from torch import Tensor

from async_rl.errors import InvariantError, UserError
from async_rl.models.routers import routers, weights_of


def replay_routing(model: Any) -> None:
    """Let `model` take `routing` [T, layers with experts, k] int, -1 where a router chooses by itself, for its one
    row of T tokens. UserError where it has no router of a known form."""
    for number, (name, router) in enumerate(routers(model).items()):
        forced = _Forced(number)
        _attention_beside(model, name).register_forward_pre_hook(forced.hear, with_kwargs=True)
        router.register_forward_hook(forced.choose)


class _Forced:
    """What one router is told, from the call of its layer's attention to its own."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._given: Tensor | None = None

    def hear(self, _attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routing = kwargs.get("routing")
        self._given = None if routing is None else routing[:, self._number].long()
        return args, {name: value for name, value in kwargs.items() if name != "routing"}

    def choose(self, router: Any, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        if self._given is None:
            return output
        if self._given.shape != own.shape:
            raise InvariantError(f"routing of {list(self._given.shape)} for a router that chose {list(own.shape)}")
        chosen = torch.where(self._given < 0, own, self._given)
        return logits, weights_of(router, logits, chosen).to(weights.dtype), chosen


def _attention_beside(model: Any, name: str) -> Any:
    """Of the decoder layer that the router `name` is in."""
    above = name
    while above:
        above = above.rpartition(".")[0]
        attention = getattr(model.get_submodule(above), "self_attn", None)
        if attention is not None:
            return attention
    raise UserError(f"trainer.router_replay = true: no attention stands beside the router {name}")
