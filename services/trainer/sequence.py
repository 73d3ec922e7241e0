"""Long sequences over the ranks that share them (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

    everywhere but in attention    each rank has a part of a row's tokens, with all heads
    attention                      each rank has all tokens of the row, with a part of the heads

An exchange of all with all leads from one to the other, and back. What is read of the logits each rank reads of its own
tokens; then all have all of it, and compute the same loss.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from async_rl.errors import UserError
from async_rl.services.trainer.logits import Logits, What
from async_rl.services.trainer.packing import Pack
from async_rl.trajectory import UNROUTED

dist: Any = torch.distributed  # whose stubs leave out what is used here


class Part(NamedTuple):
    """This rank's of a row of T tokens; t of them, the same on each rank, padded in the end."""

    input_ids: Tensor  # [1, t]
    position_ids: Tensor  # [1, t]
    routing: Tensor | None  # [t, layers, k]
    own: Tensor  # [a] which of the row's action tokens are predicted in it
    predict: Tensor  # [a] where in it


def part_of(pack: Pack, rank: int, ranks: int) -> Part:
    width = -(-pack.input_ids.shape[1] // ranks)
    begin = rank * width

    def cut(row: Tensor, fill: int) -> Tensor:
        """Of [T, ...]."""
        missing = ranks * width - len(row)
        padded = pad(row, [0, 0] * (row.ndim - 1) + [0, missing], value=fill)
        return padded[begin : begin + width]

    own = torch.nonzero((pack.predict >= begin) & (pack.predict < begin + width))[:, 0]
    return Part(
        input_ids=cut(pack.input_ids[0], 0)[None],
        position_ids=cut(pack.position_ids[0], 0)[None],
        routing=None if pack.routing is None else cut(pack.routing, UNROUTED),
        own=own,
        predict=pack.predict[own] - begin,
    )


def require_heads(model: Any, ranks: int, cut: int = 1) -> None:
    """UserError where the heads of `model`, of which a rank has one in `cut`, cannot be shared by so many."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads) // cut
    heads = config.num_attention_heads // cut
    able = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if ranks not in able:
        raise UserError(
            f"trainer.sequence_parallel = {ranks}: {heads} heads, and {kv_heads} of keys and values, cannot be shared "
            f"so; one of {able}"
        )


def to_heads(states: Tensor, group: Any) -> Tensor:
    """[1, H, t, D] of this rank's tokens -> [1, H / n, n t, D] of all tokens. Fewer heads than ranks are repeated."""
    n = group.size()
    if states.shape[1] < n:
        states = states.repeat_interleave(n // states.shape[1], dim=1)
    heads, tokens, size = states.shape[1:]
    exchanged = _AllToAll.apply(states.reshape(n, heads // n, tokens, size), group)  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1).reshape(1, heads // n, n * tokens, size)  # type: ignore[no-any-return]


def to_tokens(states: Tensor, group: Any) -> Tensor:
    """[1, T, H / n, D] of all tokens -> [1, t, H, D] of this rank's, T being padded."""
    n = group.size()
    _, tokens, heads, size = states.shape
    width = -(-tokens // n)
    padded = pad(states[0], [0, 0, 0, 0, 0, n * width - tokens])
    exchanged = _AllToAll.apply(padded.reshape(n, width, heads, size), group)  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1).reshape(1, width, n * heads, size)  # type: ignore[no-any-return]


class Spread(Logits):
    """Those of A action tokens over a `group` of ranks, of which this one has the rows `own` [a]."""

    def __init__(self, logits: Logits, own: Tensor, count: int, group: Any) -> None:
        self._logits, self._own, self._count, self._group = logits, own, count, group

    def read(self, what: What, *columns: Tensor | None) -> list[Tensor]:
        mine = [None if column is None else column[self._own] for column in columns]
        made = self._logits.read(what, *mine)
        return [_Gathered.apply(part, self._own, self._count, self._group) for part in made]  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """The k-th block goes to the k-th rank; so do gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Rows of all ranks. All compute the same of them, so a rank takes the gradient of its own rows alone."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        whole = part.new_zeros(count)
        whole[own] = part
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0][own], None, None, None
