"""Which groups a step gets: earliest deadline first, never the first finishers. Pure.

A group whose oldest token has version w can be drawn for steps up to its deadline w + eta'.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Entry(NamedTuple):
    """A held group at a draw, in the order in which it is taken."""

    deadline: int
    group: int


class Refused(NamedTuple):
    """`late`: the group without which the rest would miss its deadlines; None: too few are ready."""

    late: int | None


def choose(
    ready: Iterable[Entry],
    others: Iterable[Entry],
    *,
    size: int,
    step: int,
    groups: int,
    reuse: int,
    waits: bool,
) -> list[int] | Refused:
    """The `size` ready groups that come first by deadline and admission.

    others: held groups that are not ready and have a deadline. waits: the draw is allowed only if what it
    leaves stays feasible.
    """
    queue = sorted(ready)
    if len(queue) < size:
        return Refused(None)
    taken, left = queue[:size], queue[size:]
    if waits:
        late = first_infeasible([*left, *others], step=step, groups=groups, reuse=reuse)
        if late is not None:
            return Refused(late.group)
    return [entry.group for entry in taken]


def first_infeasible(held: list[Entry], *, step: int, groups: int, reuse: int) -> Entry | None:
    """The first group that misses its deadline if `held` is drawn by the steps that follow `step`.

    Feasible: for every d, those with deadline <= d number at most floor((d - step) / r) * B.
    """
    for count, entry in enumerate(sorted(held), start=1):
        if count > (entry.deadline - step) // reuse * groups:
            return entry
    return None
