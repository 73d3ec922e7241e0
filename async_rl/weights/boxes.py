"""Boxes of a tensor's global index space: what a rank holds of a parameter, what an engine wants of it. Pure."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The indices i with low[d] <= i[d] < high[d] in every dimension d; of a scalar, the one index ()."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(high - low, 0) for low, high in zip(self.low, self.high, strict=True))

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return Box(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None

    def holds(self, other: "Box") -> bool:
        return all(a <= b for a, b in zip(self.low, other.low, strict=True)) and all(
            a >= b for a, b in zip(self.high, other.high, strict=True)
        )

    def span(self, dim: int, low: int, high: int) -> "Box":
        """The part whose indices along `dim`, counted from this box's own beginning, are low to high - 1."""
        start, end = self.low[dim], self.high[dim]
        return self.along(dim, min(start + low, end), min(start + high, end))

    def chunk(self, dim: int, parts: int, index: int) -> "Box":
        """The `index`th of `parts` as torch.chunk cuts them: all equally large but the last, which may be empty."""
        size = -(-self.shape[dim] // parts)
        return self.span(dim, index * size, (index + 1) * size)

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds exactly `outer`."""
        return tuple(slice(low - o, high - o) for low, high, o in zip(self.low, self.high, outer.low, strict=True))

    def widened(self, block: Sequence[int], shape: Sequence[int]) -> "Box":
        """With every block that it touches whole: blocks of `block` tile a tensor of `shape` from its first index."""
        low = tuple(a // b * b for a, b in zip(self.low, block, strict=True))
        high = tuple(min(-(-a // b) * b, n) for a, b, n in zip(self.high, block, shape, strict=True))
        return Box(low, high)

    def pieces(self, most: int) -> list["Box"]:
        """This box in parts of at most `most` elements each, cut along the outermost dimensions, so that each part
        is as contiguous as the whole."""
        if self.size <= most:
            return [self]
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        rows = max(most * self.shape[dim] // self.size, 1)
        cuts = range(0, self.shape[dim], rows)
        return [part for at in cuts for part in self.span(dim, at, at + rows).pieces(most)]

    def along(self, dim: int, low: int, high: int) -> "Box":
        """From `low` to `high` along `dim`, the same otherwise."""
        return Box(
            (*self.low[:dim], low, *self.low[dim + 1 :]),
            (*self.high[:dim], high, *self.high[dim + 1 :]),
        )


def cells(boxes: Iterable[Box]) -> list[Box]:
    """The grid that the sides of `boxes` cut: each cell is inside a box or outside of it, never both."""
    given = list(boxes)
    if not given:
        return []
    dims = len(given[0].low)
    cuts = [sorted({side for box in given for side in (box.low[d], box.high[d])}) for d in range(dims)]
    ranges = [list(itertools.pairwise(sides)) for sides in cuts]
    return [Box(tuple(a for a, _ in sides), tuple(b for _, b in sides)) for sides in itertools.product(*ranges)]


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint `boxes` as fewer: neighbours that are one box together become it, the innermost dimension first."""
    found = list(boxes)
    for dim in reversed(range(len(found[0].low) if found else 0)):
        rest: list[Box] = []
        for box in sorted(found, key=lambda b: (b.along(dim, 0, 0), b.low[dim])):
            last = rest[-1] if rest else None
            if last is not None and last.along(dim, 0, 0) == box.along(dim, 0, 0) and last.high[dim] == box.low[dim]:
                rest[-1] = Box(last.low, box.high)
            else:
                rest.append(box)
        found = rest
    return sorted(found)
