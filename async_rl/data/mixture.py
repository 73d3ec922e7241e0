"""Which source a position of the stream belongs to: proportions by weight, random access, no state.

Item k (0, 1, ...) of a source with share p of the weights is due at (k + 1/2) / p; the stream is all items in
the order they are due (Sainte-Laguë's method: after any number of items each source is within one or two of
its share). The rank of an item in that order is a closed formula, in exact fractions, so that position 10^9
costs what position 0 costs and every process agrees.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction


class Mixture:
    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(map(Fraction, weights))
        self._shares = [Fraction(weight) / total for weight in weights]

    def item(self, position: int) -> tuple[int, int]:
        """(source, k): the stream's item at `position` is the k-th of that source."""
        reach = len(self._shares) + 1
        for source, share in enumerate(self._shares):
            near = math.floor(position * share)
            for k in range(max(0, near - reach), near + reach + 1):
                if self.position(source, k) == position:
                    return source, k
        raise AssertionError(f"position {position} belongs to no source of shares {self._shares}")

    def position(self, source: int, k: int) -> int:
        """Where in the stream the k-th item of `source` is: k plus the items of others due before it."""
        due = self._due(source, k)
        position = k
        for other, share in enumerate(self._shares):
            if other < source:  # ties go to the source that is named first
                position += max(0, math.floor(share * due - Fraction(1, 2)) + 1)
            elif other > source:
                position += max(0, math.ceil(share * due - Fraction(1, 2)))
        return position

    def prefix(self, counts: Sequence[int]) -> int:
        """Length of the shortest beginning of the stream with at least counts[i] items of each source i."""
        return 1 + max(self.position(source, count - 1) for source, count in enumerate(counts))

    def once(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """In order, at most counts[i] of source i; one that is used up leaves its turns to the others."""
        turns = [(self._due(source, 0), source, 0) for source, count in enumerate(counts) if count > 0]
        heapq.heapify(turns)
        while turns:
            _, source, k = turns[0]
            yield source, k
            if k + 1 < counts[source]:
                heapq.heapreplace(turns, (self._due(source, k + 1), source, k + 1))
            else:
                heapq.heappop(turns)

    def _due(self, source: int, k: int) -> Fraction:
        return Fraction(2 * k + 1, 2) / self._shares[source]
