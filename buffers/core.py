"""What all commands share: the state, who is alive, and the one way in which anything changes."""

from collections.abc import Callable, Iterable, Sequence

from async_rl.buffers import events, life
from async_rl.buffers.group import Group
from async_rl.buffers.roster import Roster
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import State
from async_rl.buffers.store import Store
from async_rl.errors import JournalDamaged
from async_rl.trajectory import Task


class Core:
    """task_of: the task at a position of the stream, which goes into the draws that are kept."""

    def __init__(self, state: State, store: Store, task_of: Callable[[int], Task]) -> None:
        self.state, self.store, self.task_of = state, store, task_of
        self.roster = Roster(state.settings.lease_s, state.settings.lease_max_s)
        self._events: list[events.Any] = []

    @property
    def settings(self) -> Settings:
        return self.state.settings

    @property
    def idle(self) -> bool:
        """Nothing happened since the last `take`."""
        return not self._events

    def take(self) -> list[events.Any]:
        """What happened since the last call, in order."""
        happened, self._events = self._events, []
        return happened

    def record(self, *happened: events.Any) -> None:
        for event in happened:
            self.state.apply(event)
            self._events.append(event)

    def follow(self, number: int, detail: str = "") -> None:
        """Record what the last event on group `number` makes due; `detail` says why, should it fail now."""
        group = self.state.find(number)
        if group is None:
            return
        self.record(*life.next_events(group, self.settings, detail))
        if self.state.failed_in_row >= self.settings.max_failures:
            self.end_broken(
                f"{self.state.failed_in_row} groups failed in a row (services.max_failures = "
                f"{self.settings.max_failures}); the last: {self.state.last_failure}"
            )

        filtered = sum(self.state.filtered.values())
        if filtered >= self.settings.max_filtered:
            counts = ", ".join(f"{reason} {count}" for reason, count in self.state.filtered.items())
            self.end_broken(
                f"{filtered} groups in a row were dropped by [filter] ({counts}), none was left to train "
                f"(filter.max_in_row = {self.settings.max_filtered})"
            )

    def lose_damaged(self, groups: Iterable[Group], members: Sequence[int] | None = None) -> bool:
        """Whether the store has lost any trajectory of `groups`; those that it has are generated again."""
        lost: list[events.Lost] = []
        for group in groups:
            for member in list(group.trajectories) if members is None else members:
                try:
                    self.store.get(group.trajectories[member].place)
                except JournalDamaged as error:
                    lost.append(events.Lost(group.id, member, str(error)))
        self.record(*lost)
        return bool(lost)

    def drop_stale(self, groups: Iterable[Group]) -> None:
        """Their tasks come back as new groups, first in line."""
        self.record(*[events.Dropped(group.id, "stale") for group in groups])

    def begin_evaluation(self, asked: int, version: int, restarted: int) -> None:
        first = -1 - self.state.evaluated
        tasks, samples = self.settings.held_out, self.settings.samples
        self.record(events.EvaluationBegan(asked, version, restarted, first, tasks, samples))

    def end_held(self) -> None:
        """What is held becomes dropped(end)."""
        self.record(*[events.Dropped(number, "end") for number in sorted(self.state.training.groups)])

    def end_broken(self, reason: str) -> None:
        """The run cannot go on; the first reason stands."""
        if self.state.broken is None:
            self.record(events.Broke(reason))
