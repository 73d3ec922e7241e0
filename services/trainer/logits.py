"""Logits that never stand in memory whole.

[tokens, vocabulary] in float32 is 600 KB a token at a vocabulary of 150 k, several times over in a log-softmax and its
gradient: more than all the rest of a model. What an algorithm wants of them is a few numbers a token. So the model's
last states are kept, and logits are made of some rows at a time, read, and dropped; the backward pass makes them again.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

What = Callable[..., tuple[Tensor, ...]]
"""Logits [R, V], columns [R, ...] -> tensors [R]."""


class Logits:
    """The logits [A, V] of A tokens. of_rows: a part [R, H] of `states` [A, H] -> its logits [R, V].
    rows: R at most."""

    def __init__(self, states: Tensor, of_rows: Callable[[Tensor], Tensor], rows: int) -> None:
        self._states, self._of_rows, self._rows = states, of_rows, rows

    @classmethod
    def whole(cls, logits: Tensor) -> "Logits":
        return cls(logits, lambda rows: rows, max(len(logits), 1))

    def read(self, what: What, *columns: Tensor | None) -> list[Tensor]:
        """`what(logits, *columns)` of all rows."""
        if len(self._states) <= self._rows:
            return list(what(self._of_rows(self._states), *columns))

        def part(states: Tensor, *own: Tensor | None) -> tuple[Tensor, ...]:
            return what(self._of_rows(states), *own)

        made = []  # without the generators' states: nothing behind the last states draws a random number
        for at in range(0, len(self._states), self._rows):
            rows = slice(at, at + self._rows)
            own = [None if column is None else column[rows] for column in columns]
            made.append(checkpoint(part, self._states[rows], *own, use_reentrant=False, preserve_rng_state=False))
        return [torch.cat(parts) for parts in zip(*made, strict=True)]


def logits_of(model: Any, inputs: Mapping[str, Any], predict: Tensor, most: int) -> Logits:
    """The logits of the language model `model` at the places `predict` [A] of the one row in `inputs`, of which at
    most `most` bytes of float32 stand at once (one row at least)."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows = max(most // (4 * vocabulary), 1)
    if len(predict) <= rows:
        return Logits.whole(model(**inputs, logits_to_keep=predict).logits[0])
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _module, _args, out: seen.append(out.last_hidden_state))
    try:
        model(**inputs, logits_to_keep=predict[:1])
    finally:
        hook.remove()
    return Logits(seen[0][0, predict], lambda states: _head(model, states), rows)


def _head(model: Any, states: Tensor) -> Tensor:
    """[R, V]: all that `model` does behind its last states [R, H]; some scale or cap their logits there."""
    with _given(model.base_model, states[None]):
        logits: Tensor = model(use_cache=False).logits[0]
    return logits


@contextlib.contextmanager
def _given(base: Any, states: Tensor) -> Iterator[None]:
    """`base` returns `states`, whatever it is asked."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    own = vars(base).get("forward")  # of this object, where somebody has wrapped it; else its class's
    base.forward = lambda *_args, **_kwargs: MoeModelOutputWithPast(last_hidden_state=states)
    try:
        yield
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own
