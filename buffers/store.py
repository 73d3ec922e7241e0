"""Where trajectories and draws lie. The state keeps what it decides by, and a place for the rest.

A store is written to before the event that names the place: the journal (journal/) puts both into one log,
in that order. `MemoryStore` keeps nothing beyond what the state names.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from async_rl.buffers.group import Group, Outline, Place
from async_rl.errors import AsyncRLError
from async_rl.protocol import buffer as messages
from async_rl.trajectory import Score, Task, Trajectory


class KeptMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    member: int
    place: Place  # of its trajectory
    score: Score


class KeptGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: int
    attempt: int
    position: int
    bound: int  # largest lag of a token in the loss
    task: Task
    members: list[KeptMember]
    greedy: KeptMember | None = None

    @property
    def everyone(self) -> list[KeptMember]:
        return self.members if self.greedy is None else [*self.members, self.greedy]


class KeptDraw(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draw with all that its steps need but the trajectories themselves: what redo and replay read."""

    step: int
    epoch: int
    dropped_stale: int  # groups so far
    failed: int
    groups: list[KeptGroup]  # in deadline and admission order


class Store(Protocol):
    def put(self, group: int, member: int, trajectory: Trajectory) -> Place: ...

    def get(self, place: Place) -> Trajectory:
        """JournalDamaged where the bytes are not those that were put."""
        ...

    def put_draw(self, draw: KeptDraw) -> Place: ...

    def get_draw(self, place: Place) -> KeptDraw:
        """JournalDamaged as above; AsyncRLError where this store keeps no draws."""
        ...


class MemoryPlace(Place, frozen=True):
    """Carries its content, which so lives as long as the state names it."""

    content: Trajectory


class MemoryStore:
    """For simulations and for runs with journal.enabled = false: of the draws only the newest can be had again."""

    def __init__(self) -> None:
        self._newest: KeptDraw | None = None

    def put(self, group: int, member: int, trajectory: Trajectory) -> Place:
        return MemoryPlace(0, 0, 0, trajectory)

    def get(self, place: Place) -> Trajectory:
        assert isinstance(place, MemoryPlace)
        return place.content

    def put_draw(self, draw: KeptDraw) -> Place:
        self._newest = draw
        return Place(0, draw.step, 0)

    def get_draw(self, place: Place) -> KeptDraw:
        if self._newest is None or self._newest.step != place.offset:
            raise AsyncRLError(
                f"the draw of step {place.offset} is kept no more: this run has no journal (journal.enabled = false)"
            )
        return self._newest


def outline(trajectory: Trajectory, place: Place) -> Outline:
    versions = [version for version, _ in trajectory.spans]
    return Outline(min(versions), max(versions), trajectory.sampled, trajectory.stop != "eos", place)


def kept_draw(
    step: int,
    epoch: int,
    groups: Sequence[Group],
    task_of: Callable[[int], Task],
    *,
    hard_max: int | None,
    dropped_stale: int,
    failed: int,
) -> KeptDraw:
    """task_of: the task at a position of the stream. hard_max: the bound under `correct`."""
    return KeptDraw(
        step,
        epoch,
        dropped_stale,
        failed,
        [
            KeptGroup(
                group.id,
                group.attempt,
                group.position,
                group.eta if hard_max is None else hard_max,
                task_of(group.position),
                [_member(group, m) for m in group.trained],
                None if group.greedy is None else _member(group, group.greedy),
            )
            for group in groups
        ],
    )


def drawn(draw: KeptDraw, step: int, get: Callable[[Place], Trajectory]) -> messages.Drawn:
    """What the trainer gets for `step` of `draw`, which is trained for `reuse` steps from draw.step on."""
    return messages.Drawn(
        step=step,
        groups=[
            messages.DrawnGroup(
                group=group.group,
                attempt=group.attempt,
                task=group.task,
                bound=group.bound,
                members=[_drawn(member, get) for member in group.members],
                greedy=None if group.greedy is None else _drawn(group.greedy, get),
            )
            for group in draw.groups
        ],
        dropped_stale=draw.dropped_stale,
        failed=draw.failed,
        sequence=step - draw.step,
    )


def _member(group: Group, member: int) -> KeptMember:
    return KeptMember(member, group.trajectories[member].place, group.scores[member])


def _drawn(kept: KeptMember, get: Callable[[Place], Trajectory]) -> messages.DrawnMember:
    return messages.DrawnMember(kept.member, get(kept.place), kept.score)
