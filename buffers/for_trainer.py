"""The trainer's commands: draws, committed steps, evaluations."""

from msgspec import Struct

from async_rl.buffers import events
from async_rl.buffers.core import Core
from async_rl.buffers.draw import Entry, Refused, choose
from async_rl.buffers.evaluation import Evaluation
from async_rl.buffers.group import Group
from async_rl.buffers.settings import changed_data
from async_rl.buffers.state import Batch
from async_rl.buffers.store import KeptDraw, kept_draw
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.protocol.buffer import Cursor


class Waiting(Struct, frozen=True):
    """No draw yet: `ready` of `size` groups are; `late`: the group that the draw must not leave behind."""

    ready: int
    size: int
    late: int | None = None


class Ended(Struct, frozen=True):
    """There is no further step."""

    reason: str


class ForTrainer:
    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, epoch: int, at: int, cursor: Cursor | None = None) -> int:
        """A trainer begins with the weights of version `at`, younger than any before; the buffer's version.

        ConfigError where the steps between them cannot be made again, or the data is not that of `cursor`."""
        self._fence(epoch)
        core, state = self._core, self._core.state
        changed = [] if cursor is None else changed_data(cursor.data, core.settings.data)
        if changed:
            raise ConfigError(f"the data is not that of the checkpoint of version {at}: {', '.join(changed)} changed")
        if cursor is not None and not state.version and not state.admitted:
            core.record(events.Restored(cursor.version, cursor.trained, cursor.position, cursor.again))
        if at > state.version:
            raise ConfigError(
                f"the checkpoint is of version {at}, but the journal ends at version {state.version}: they are not "
                "of one run"
            )
        gone = next((step for step in range(at, state.version) if self._first_step(step) is None), None)
        if gone is not None:
            raise ConfigError(
                f"the trainer begins at version {at}, but what step {gone} was trained on is kept no more "
                "(journal.enabled, journal.keep)"
            )
        return state.version

    def made(self, step: int, epoch: int) -> KeptDraw | None:
        """The draw that `step` was made with; None where it is still to be made."""
        self._fence(epoch)
        if step >= self._core.state.version:
            return None
        first = self._first_step(step)
        if first is None:
            raise AsyncRLError(f"draw of step {step}: what it was trained on is kept no more")
        return self._core.store.get_draw(self._core.state.draws[first].place)

    def _first_step(self, step: int) -> int | None:
        """The first step of the kept draw that `step` was trained on."""
        reuse = self._core.settings.reuse
        return next((first for first in range(step, step - reuse, -1) if first in self._core.state.draws), None)

    def checkpointed(self, version: int, epoch: int) -> None:
        """No trainer begins before `version` again."""
        self._fence(epoch)
        if not 0 <= version <= self._core.state.version:
            raise AsyncRLError(f"no checkpoint of version {version}: the newest is {self._core.state.version}")
        self._core.record(events.Checkpointed(version))

    def cursor(self) -> Cursor:
        """Where the data stands at this version."""
        state = self._core.state
        held = [g.position for _, g in sorted(state.training.groups.items()) if g.phase != "drawn"]
        return Cursor(state.version, state.trained, state.cursor, [*state.again, *held], dict(state.settings.data))

    def draw(self, step: int, epoch: int) -> Batch | Waiting | Ended:
        """The batch of `step`; asked again, the same. AsyncRLError for an older trainer, a step that is not
        the next one, and a run that cannot go on."""
        self._fence(epoch)
        state, settings = self._core.state, self._core.settings
        if state.broken is not None:
            raise AsyncRLError(state.broken)
        if state.closed is not None:
            return Ended(f"the run is closed: {state.closed}")
        if step >= settings.max_steps:
            return Ended(f"max_steps = {settings.max_steps} reached")
        if step != state.version:
            raise AsyncRLError(f"draw of step {step}: the next step is {state.version}")
        return self._draw(step) if state.batch is None else state.batch

    def _draw(self, step: int) -> Batch | Waiting | Ended:
        state, s = self._core.state, self._core.settings
        if s.on_exceed == "mask":
            self._core.drop_stale(self._without_fresh_token(step))
        size = s.groups
        if state.undrawn < size and state.exhausted:
            if s.at_end == "drop":
                self._core.end_held()
            size = state.undrawn
            if not size:
                return Ended(f"the data ended after {s.tasks} tasks")
        ready = state.training.count("ready")
        if ready < size:
            return self._refuse(Waiting(ready, size))
        chosen = choose(
            self._entries(ready=True),
            self._entries(ready=False),
            size=size,
            step=step,
            groups=s.groups,
            reuse=s.reuse,
            waits=s.waits,
        )
        if isinstance(chosen, Refused):
            return self._refuse(Waiting(ready, size, chosen.late))
        groups = [state.training.groups[number] for number in chosen]
        if self._core.lose_damaged(groups):
            return self._refuse(Waiting(state.training.count("ready"), size))
        self._core.record(self._kept(step, groups))
        state.check()
        assert state.batch is not None
        return state.batch

    def _kept(self, step: int, groups: list[Group]) -> events.Drawn:
        core, state = self._core, self._core.state
        draw = kept_draw(
            step,
            state.epoch,
            groups,
            core.task_of,
            hard_max=core.settings.hard_max,
            dropped_stale=state.dropped.get("stale", 0),
            failed=sum(state.failed.values()),
        )
        place = core.store.put_draw(draw)
        lowest = min((m.place.segment for g in draw.groups for m in g.everyone), default=place.segment)
        numbers, attempts = [g.id for g in groups], [g.attempt for g in groups]
        return events.Drawn(step, state.epoch, numbers, attempts, place, lowest)

    def finish_step(self, step: int, epoch: int) -> int:
        """`step` is made: the new policy version. Asked again, the same."""
        self._fence(epoch)
        state = self._core.state
        if step == state.version - 1:
            return state.version
        if step != state.version or state.batch is None:
            raise AsyncRLError(f"finish of step {step}: the next step is {state.version}, and a step is drawn first")
        self._core.record(events.StepCommitted(step))
        if self._core.settings.on_exceed == "drop":
            self._core.drop_stale(self._past_deadline())
        state.check()
        return state.version

    def change_eta(self, eta: int) -> None:
        """Another staleness.max, for the groups that are admitted from here on."""
        settings = self._core.settings
        if settings.eta_prime(eta) < 0:
            raise AsyncRLError(f"staleness.max = {eta} is below staleness.reuse - 1 = {settings.reuse - 1}")
        if eta != self._core.state.eta:
            self._core.record(events.EtaChanged(eta))

    def evaluate(self, version: int) -> None:
        """Sample the held-out tasks at exactly `version`; asked again, nothing happens."""
        state = self._core.state
        if version in state.evaluations:
            return
        if state.closed is not None:
            raise AsyncRLError(f"no evaluation of version {version}: the run is closed ({state.closed})")
        if not 0 <= version <= state.version:
            raise AsyncRLError(f"no evaluation of version {version}: the newest is {state.version}")
        if not self._core.settings.held_out:
            raise AsyncRLError(f"no evaluation of version {version}: data.held_out names no task")
        self._core.begin_evaluation(version, version, 0)

    def evaluation(self, version: int) -> Evaluation | None:
        """The evaluation asked for at `version`, once it is done; AsyncRLError where it never will be."""
        state = self._core.state
        evaluation = state.evaluations.get(version)
        if evaluation is None:
            raise AsyncRLError(f"no evaluation was asked for at version {version}")
        if evaluation.done:
            return evaluation
        if state.broken is not None:
            raise AsyncRLError(state.broken)
        if state.closed is not None:
            done = f"{len(evaluation.marks)} of {evaluation.tasks} tasks"
            raise AsyncRLError(f"the evaluation of version {version} had {done} when the run was closed")
        return None

    def _fence(self, epoch: int) -> None:
        newest = self._core.state.epoch
        if epoch < newest:
            raise AsyncRLError(f"trainer epoch {epoch} is older than {newest}: a younger trainer took over")
        if epoch > newest:
            self._core.record(events.EpochRaised(epoch))

    def _refuse(self, waiting: Waiting) -> Waiting:
        """A refused draw that neither an open group nor a new one can change ends the run."""
        state = self._core.state
        open_groups = state.undrawn - state.training.count("ready")
        new_groups = waiting.late is None and not state.exhausted and state.capacity > 0
        if not open_groups and not new_groups:
            reason = (
                f"step {state.version} can never be drawn: {waiting.ready} of {waiting.size} groups are "
                "ready, none is under way and none may be admitted"
            )
            self._core.end_broken(reason)
            raise AsyncRLError(reason)
        return waiting

    def _entries(self, *, ready: bool) -> list[Entry]:
        """The groups that are ready, or those that are not but have a deadline already."""
        entries: list[Entry] = []
        for group in self._core.state.training.groups.values():
            deadline = self._core.state.deadline(group)
            if deadline is not None and group.phase != "drawn" and (group.phase == "ready") == ready:
                entries.append(Entry(deadline, group.id))
        return entries

    def _past_deadline(self) -> list[Group]:
        """Undrawn groups, in flight ones too, that no later draw may take, in order of admission."""
        state = self._core.state
        late: list[Group] = []
        for number in sorted(state.training.groups):
            group = state.training.groups[number]
            deadline = state.deadline(group)
            if deadline is not None and deadline < state.next_draw and group.phase != "drawn":
                late.append(group)
        return late

    def _without_fresh_token(self, step: int) -> list[Group]:
        """Ready groups that would be masked whole, at the latest in the last step of their draw."""
        ready = self._core.state.training.in_order("ready")
        return [group for group in ready if step - group.youngest > self._core.settings.eta_prime(group.eta)]
