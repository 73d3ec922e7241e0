"""The buffer's durable state. `apply` is the only thing that changes it, so a journal of events redoes it.

Conservation, at any moment: admitted = trained + dropped + failed + held.
"""

from msgspec import Struct, field

from async_rl.buffers import admission, events
from async_rl.buffers.evaluation import Evaluation, Mark
from async_rl.buffers.group import Group, Lease, Place, Pool, Receipt
from async_rl.buffers.settings import Settings
from async_rl.errors import InvariantError
from async_rl.protocol.buffer import LeaseId

REMEMBERED = 1024
"""Ended groups whose receipts are kept, so that a repeated Finish still gets its first answer."""

REPORTS = 8
"""Evaluations whose tallies are kept."""


class Batch(Struct):
    """A draw: trained for `reuse` consecutive steps from `step` on."""

    step: int
    groups: list[Group]  # in deadline and admission order
    place: Place  # of what was sent, a store.KeptDraw


class Kept(Struct, frozen=True):
    """Where a draw lies that may have to be made again."""

    place: Place
    lowest: int  # first segment of the journal that its trajectories lie in


class Over(Struct, frozen=True):
    """What is remembered of a group that ended."""

    how: str  # "trained", "dropped(stale)"
    receipts: dict[Receipt, bool]


class State(Struct):
    settings: Settings
    eta: int
    version: int = 0
    epoch: int = 0
    cursor: int = 0  # next position in the stream of tasks
    again: list[int] = field(default_factory=list)  # positions that come first, of groups that went stale
    training: Pool = field(default_factory=Pool)
    held_out: Pool = field(default_factory=Pool)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    batch: Batch | None = None
    draws: dict[int, Kept] = field(default_factory=dict)  # by first step, since the oldest checkpoint that is kept
    over: dict[int, Over] = field(default_factory=dict)  # the last REMEMBERED ended groups
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    failed_in_row: int = 0
    last_failure: str = ""
    filtered: dict[str, int] = field(default_factory=dict)  # by reason, since a group was ready
    lapsed: int = 0
    tokens: int = 0  # action tokens of all trajectories taken in
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by the version asked for
    evaluated: int = 0  # evaluation groups so far
    closed: str | None = None
    left: list[int] = field(default_factory=list)  # positions of the tasks that were not trained when it was closed
    broken: str | None = None

    # --- what follows from it ------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return len(self.training.groups)

    @property
    def m(self) -> int:
        """Groups trained + groups held: a group that ends dropped or failed frees its place."""
        return self.trained + self.held

    @property
    def undrawn(self) -> int:
        return self.held - self.training.count("drawn")

    @property
    def next_draw(self) -> int:
        """The step that the next draw is for; later than the version while a draw is being trained."""
        return self.version if self.batch is None else self.batch.step + self.settings.reuse

    @property
    def exhausted(self) -> bool:
        """There is no further task."""
        return self.settings.tasks is not None and self.cursor >= self.settings.tasks and not self.again

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now, as far as there are tasks."""
        s = self.settings
        return admission.capacity(
            self.m,
            self.version,
            groups=s.groups,
            reuse=s.reuse,
            eta_prime=s.eta_prime(self.eta),
            max_steps=s.max_steps,
        )

    def due(self, m: int) -> int:
        return admission.due(m, self.version, groups=self.settings.groups, reuse=self.settings.reuse)

    def deadline(self, group: Group) -> int | None:
        """The last step that may draw `group`; None while it has neither token nor lease."""
        oldest = group.oldest
        return None if oldest is None else oldest + self.settings.reach(group.eta)

    def find(self, number: int) -> Group | None:
        return self.pool(number).groups.get(number)

    def pool(self, number: int) -> Pool:
        return self.training if number >= 0 else self.held_out

    def check(self) -> None:
        """InvariantError, with the groups named, where conservation does not hold."""
        gone = self.trained + sum(self.dropped.values()) + sum(self.failed.values())
        if self.admitted != gone + self.held:
            raise InvariantError(
                f"admitted {self.admitted} != trained {self.trained} + dropped {self.dropped} "
                f"+ failed {self.failed} + held {self.held}; held groups: {sorted(self.training.groups)}"
            )

    # --- changing it ---------------------------------------------------------------------------------

    def apply(self, event: events.Any) -> None:
        match event:
            case events.Admitted():
                self._admit(event)
            case events.Leased(lease=lease):
                group = self._group(lease.group)
                group.lease = self.leases[lease] = Lease(
                    lease, event.worker, event.incarnation, list(event.members), event.min_version
                )
                self.pool(group.id).move(group, "leased" if lease.stage == "generate" else "grading")
            case events.StartedAt(lease=lease, version=version):
                self.leases[lease].started = version
            case events.Generated(lease=lease, member=member, outline=outline):
                group = self._group(lease.group)
                group.trajectories[member] = outline
                self.tokens += outline.tokens
                group.sampled = outline.oldest if group.sampled is None else min(group.sampled, outline.oldest)
                self._settle(group, member, taken=True)
            case events.Scored(lease=lease, member=member, score=score):
                group = self._group(lease.group)
                group.scores[member] = score
                self._settle(group, member, taken=True)
            case events.MemberFailed(lease=lease, member=member):
                group = self._group(lease.group)
                self.leases[lease].faulty = True
                self._settle(group, member, taken=False)
            case events.LeaseFailed(lease=lease):
                group = self._group(lease.group)
                group.receipts[lease.stage, lease.attempt, -1] = False
                self._give_back(group)
            case events.LeaseReturned(lease=lease):
                group = self._group(lease.group)
                group.receipts[lease.stage, lease.attempt, -1] = False
                group.attempt += 1
                self._release(group)
            case events.Lapsed(lease=lease):
                self.lapsed += 1
                self._give_back(self._group(lease.group))
            case events.Refilled():
                self._refill(event)
            case events.Lost(group=number, member=member):
                self._lose(self._group(number), member)
            case events.Readied(group=number):
                self.failed_in_row = 0
                self.filtered.clear()
                group = self._group(number)
                group.youngest = group.youngest_vote()
                self.training.move(group, "ready")
            case events.Dropped(group=number, reason=reason):
                self._drop(self._group(number), reason)
            case events.Failed(group=number, reason=reason, detail=detail):
                self.last_failure = f"group {number}: {detail}"
                self.failed[reason] = self.failed.get(reason, 0) + 1
                self.failed_in_row += 1
                self._end(self._group(number), f"failed({reason})")
            case events.EpochRaised(epoch=epoch):
                self.epoch = epoch
            case events.Drawn(step=step, groups=numbers, place=place, lowest=lowest):
                drawn = [self._group(number) for number in numbers]
                for group in drawn:
                    self.training.move(group, "drawn")
                self.batch = Batch(step, drawn, place)
                self.draws[step] = Kept(place, lowest)
            case events.StepCommitted(step=step):
                self._commit(step)
            case events.Checkpointed(version=version):
                for old in [first for first in self.draws if first + self.settings.reuse <= version]:
                    del self.draws[old]
            case events.Restored(version=version, trained=trained, position=position, again=again):
                self.version, self.admitted, self.trained = version, trained, trained
                self.cursor, self.again = position, list(again)
            case events.SettingsChanged(settings=settings):
                self.settings = settings
            case events.EtaChanged(eta=eta):
                self.eta = eta
            case events.EvaluationBegan():
                self._begin_evaluation(event)
            case events.Evaluated(group=number):
                self._mark(self._group(number))
            case events.Closed(reason=reason, left=left):
                self.closed, self.left = reason, left
                self.again.clear()
                self.batch = None
                for group in list(self.held_out.groups.values()):
                    self._end(group, "given up at the end")
            case events.Reopened():
                self.closed = self.broken = None
                self.again = [*self.left, *self.again]
                self.left, self.failed_in_row = [], 0
                self.filtered.clear()
            case events.Broke(reason=reason):
                self.broken = reason

    def _group(self, number: int) -> Group:
        group = self.find(number)
        if group is None:
            raise InvariantError(f"an event names group {number}, which is not held")
        return group

    def _admit(self, event: events.Admitted) -> None:
        if event.again:
            self.again.remove(event.position)
        else:
            self.cursor = event.position + 1
        self.admitted += 1
        members = self.settings.members
        greedy = members[-1] if self.settings.greedy else None
        self.training.add(Group(event.group, event.position, event.eta, members, greedy))

    def _settle(self, group: Group, member: int, *, taken: bool) -> None:
        """The worker owes `member` no more; the lease ends with its last member."""
        lease = group.lease
        assert lease is not None
        lease.open.remove(member)
        group.receipts[lease.id.stage, lease.id.attempt, member] = taken
        if lease.open:
            return
        if lease.faulty:
            self._give_back(group)
        else:
            self._release(group)

    def _give_back(self, group: Group) -> None:
        """A worker failed the lease: what it did not finish is handed out again. Counts as an attempt."""
        group.failures += 1
        group.attempt += 1
        self._release(group)

    def _release(self, group: Group) -> None:
        if group.lease is not None:
            del self.leases[group.lease.id]
            group.lease = None
        self.pool(group.id).move(group, group.phase_without_lease())

    def _refill(self, event: events.Refilled) -> None:
        group = self._group(event.group)
        for member in event.out:
            del group.trajectories[member], group.scores[member]
        group.wanted = [member for member in group.wanted if member not in event.out] + event.fresh
        group.sampled = min((t.oldest for t in group.trajectories.values()), default=None)
        group.refilled = True
        group.attempt += 1
        self.pool(group.id).move(group, group.phase_without_lease())

    def _lose(self, group: Group, member: int) -> None:
        """A lease to score it ends; one to generate others goes on."""
        del group.trajectories[member]
        group.scores.pop(member, None)
        group.sampled = min((t.oldest for t in group.trajectories.values()), default=None)
        if group.lease is None or group.lease.id.stage == "score":
            group.attempt += 1
            self._release(group)

    def _drop(self, group: Group, reason: events.DropReason) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if reason == "stale":
            self.again.append(group.position)
        elif reason != "end":
            self.filtered[reason] = self.filtered.get(reason, 0) + 1
        self._end(group, f"dropped({reason})")

    def _commit(self, step: int) -> None:
        """Groups are trained with the first step of their draw, which is kept while it is reused."""
        batch = self.batch
        assert batch is not None
        self.version = step + 1
        if step == batch.step:
            self.trained += len(batch.groups)
            for group in batch.groups:
                self._end(group, "trained")
        if self.version in (batch.step + self.settings.reuse, self.settings.max_steps):
            self.batch = None

    def _end(self, group: Group, how: str) -> None:
        if group.lease is not None:
            del self.leases[group.lease.id]
            group.lease = None
        self.pool(group.id).remove(group)
        self.over[group.id] = Over(how, group.receipts)
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    def _begin_evaluation(self, event: events.EvaluationBegan) -> None:
        for group in [g for g in self.held_out.groups.values() if g.asked == event.asked]:
            self._end(group, f"given up, its version {group.exact_version} is gone")
        self.evaluations.pop(event.asked, None)
        self.evaluations[event.asked] = Evaluation(event.asked, event.version, event.restarted, event.tasks)
        finished = [asked for asked, evaluation in self.evaluations.items() if evaluation.done]
        for asked in finished[:-REPORTS]:
            del self.evaluations[asked]
        self.evaluated += event.tasks
        for position in range(event.tasks):
            self.held_out.add(
                Group(
                    event.first - position,
                    position,
                    0,
                    list(range(event.samples)),
                    exact_version=event.version,
                    asked=event.asked,
                )
            )

    def _mark(self, group: Group) -> None:
        marks = [Mark.of(group.trajectories.get(member), group.scores.get(member)) for member in group.wanted]
        self.evaluations[group.asked].marks[group.position] = marks
        self._end(group, "evaluated")


def new_state(settings: Settings) -> State:
    return State(settings, settings.eta)
