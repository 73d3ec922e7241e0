"""The trainer's commands: draws, committed steps, evaluations."""

from msgspec import Struct

from async_rl.buffers import events
from async_rl.buffers.core import Core
from async_rl.buffers.draw import Entry, Refused, choose
from async_rl.buffers.evaluation import Evaluation
from async_rl.buffers.group import Group
from async_rl.buffers.state import Batch
from async_rl.errors import AsyncRLError


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
        attempts = [state.training.groups[number].attempt for number in chosen]
        self._core.record(events.Drawn(step, state.epoch, chosen, attempts))
        state.check()
        assert state.batch is not None
        return state.batch

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
