"""Work over ranks, as even as it gets: a step ends when its slowest rank does."""

import heapq
from collections.abc import Sequence


def balanced(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Positions of `costs` in `parts` lists whose sums are near one another, by the largest differencing method
    (Karmarkar and Karp 1982): the two most uneven partial solutions are joined, the heavy side of one to the light
    side of the other, until one is left. Deterministic; positions ascend in each list.
    """
    empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(parts - 1)]
    # (minus the spread, age, its sides from heavy to light)
    heap = [(-cost, position, [(cost, [position]), *empty]) for position, cost in enumerate(costs)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        sides = [(a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        sides.sort(key=lambda side: -side[0])
        heapq.heappush(heap, (sides[-1][0] - sides[0][0], age, sides))
        age += 1
    return [sorted(members) for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]
