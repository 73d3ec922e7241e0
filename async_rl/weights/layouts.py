"""What lies where: the parts of parameters that ranks of a trainer hold, and of which engines make their tensors.

Sources cut a parameter's box along a mesh of ranks (`Box.chunk`), in the order in which the parallelisms are applied:
tensor parallelism first, FSDP over what is left of it, as `fully_shard` over a DTensor does.

Targets are an engine's own tensors as vLLM and SGLang lay them out: fused (q, k, v; gate and up), cut by tensor
parallelism, padded. Each part says which box of which parameter lies where in it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from async_rl.errors import PublicationError
from async_rl.weights.boxes import Box


class Part(NamedTuple):
    """`box` of a parameter lies at `at` in the target; where the target has more dimensions (a stack of experts), the
    first of `at` are indices into it. `needs`: what must be at hand to make it, more where blocks are quantised."""

    parameter: str
    box: Box
    at: tuple[int, ...]
    needs: Box

    def place(self, common: Box) -> tuple[int | slice, ...]:
        """Where `common`, a part of the box, lies in the target."""
        extra = len(self.at) - len(common.low)
        moved = [
            slice(low - own + at, high - own + at)
            for low, high, own, at in zip(common.low, common.high, self.box.low, self.at[extra:], strict=True)
        ]
        return (*self.at[:extra], *moved)


class Target(NamedTuple):
    """A tensor of an engine's rank. What no part covers is padding: zero."""

    name: str
    shape: tuple[int, ...]
    parts: list[Part]


def part(parameter: str, box: Box, at: Sequence[int]) -> Part:
    return Part(parameter, box, tuple(at), box)


def whole(name: str, parameter: str, shape: Sequence[int]) -> Target:
    """The same on every rank: norms, routers, whatever is small."""
    return Target(name, tuple(shape), [part(parameter, Box.whole(shape), (0,) * len(shape))])


def rows(name: str, parameters: Sequence[tuple[str, Sequence[int]]], rank: int, ranks: int) -> Target:
    """Tensor parallelism over dimension 0 (vLLM's column parallel) of one parameter (name, shape) or of several fused
    one below the other (gate and up): of each its `rank`th part.

    Raises PublicationError where one does not divide by `ranks`.
    """
    return _cut(name, parameters, 0, rank, ranks)


def columns(name: str, parameter: str, shape: Sequence[int], rank: int, ranks: int) -> Target:
    """Tensor parallelism over dimension 1 (vLLM's row parallel): o_proj, down_proj."""
    return _cut(name, [(parameter, shape)], 1, rank, ranks)


def fused_qkv(
    name: str,
    parameters: Sequence[str],
    hidden: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    rank: int,
    ranks: int,
) -> Target:
    """q, k and v (`parameters`) one below the other. Of more ranks than heads of k and v, several hold the same one.

    hidden: the dimensions behind the first; none for a bias.
    """
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise PublicationError(f"{name}: {heads} heads and {kv_heads} of k and v cannot be cut for {ranks} ranks")
    boxes = []
    for parameter, count in zip(parameters, (heads, kv_heads, kv_heads), strict=True):
        own = max(count // ranks, 1)
        first = rank * count // ranks
        box = Box.whole((count * head_size, *hidden))
        boxes.append((parameter, box.span(0, first * head_size, (first + own) * head_size)))
    return _stacked(name, boxes)


def vocabulary(name: str, parameter: str, shape: Sequence[int], rank: int, ranks: int, *, multiple: int = 64) -> Target:
    """Embeddings or a head, cut over the vocabulary, which is padded to a multiple of `multiple` x `ranks`."""
    size = -(-shape[0] // (multiple * ranks)) * multiple
    box = Box.whole(shape).span(0, rank * size, (rank + 1) * size)
    found = [part(parameter, box, (0,) * len(shape))] if box.size else []
    return Target(name, (size, *shape[1:]), found)


def experts(
    name: str, parameters: Sequence[Sequence[tuple[str, Sequence[int]]]], *, dim: int, rank: int, ranks: int
) -> Target:
    """A stack of experts [E, ...]: of each its parameters fused one below the other, cut over `dim` of them by tensor
    parallelism: (gate, up) over 0, (down) over 1. Expert parallelism is a choice of which experts are given."""
    stacked = [_cut(name, expert, dim, rank, ranks) for expert in parameters]
    parts = [part(p.parameter, p.box, (e, *p.at)) for e, expert in enumerate(stacked) for p in expert.parts]
    return Target(name, (len(stacked), *stacked[0].shape), parts)


def quantised(target: Target, block: Sequence[int], shapes: dict[str, Sequence[int]]) -> Target:
    """`target` where each `block` of a parameter shares a scale: whoever quantises needs whole blocks of the weights.
    shapes: of the parameters."""
    return target._replace(parts=[p._replace(needs=p.box.widened(block, shapes[p.parameter])) for p in target.parts])


def _cut(name: str, parameters: Sequence[tuple[str, Sequence[int]]], dim: int, rank: int, ranks: int) -> Target:
    """The `rank`th of `ranks` equal parts of each along `dim`, one below the other."""
    boxes = []
    for parameter, shape in parameters:
        if shape[dim] % ranks:
            raise PublicationError(f"{parameter}: dimension {dim} of {list(shape)} cannot be cut for {ranks} ranks")
        boxes.append((parameter, Box.whole(shape).chunk(dim, ranks, rank)))
    return _stacked(name, boxes)


def _stacked(name: str, boxes: Sequence[tuple[str, Box]]) -> Target:
    """Boxes one below the other along dimension 0."""
    parts, height = [], 0
    for parameter, box in boxes:
        parts.append(part(parameter, box, (height, *(0,) * (len(box.low) - 1))))
        height += box.shape[0]
    return Target(name, (height, *boxes[0][1].shape[1:]), parts)
