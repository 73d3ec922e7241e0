"""A group (one task, sampled G times), the lease on it, and the pool that indexes groups by phase.

Mutable, but only `State.apply` changes them.
"""

from typing import Literal, get_args

from msgspec import Struct, field

from async_rl.protocol.buffer import LeaseId
from async_rl.trajectory import Score

Phase = Literal["waiting", "leased", "generated", "grading", "scored", "ready", "drawn"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Receipt = tuple[str, int, int]
"""(stage, attempt, member) of a result that was taken; member -1: the whole lease was given up."""


class Place(Struct, frozen=True):
    """Where something lies in the journal. `nbytes`: of its whole record."""

    segment: int
    offset: int
    nbytes: int


class Outline(Struct, frozen=True):
    """What the state knows of a trajectory: enough to decide by."""

    oldest: int  # version of its oldest action token
    youngest: int
    tokens: int  # action tokens
    truncated: bool  # stopped by max_new_tokens
    place: Place


class Lease(Struct):
    id: LeaseId
    worker: str
    incarnation: str
    open: list[int]  # members that the worker still owes
    min_version: int
    started: int | None = None  # version of its oldest token, as reported
    faulty: bool = False  # a member was given up

    @property
    def oldest(self) -> int:
        """No token of the lease is older; until it is reported, what was granted stands for it."""
        return self.min_version if self.started is None else self.started


class Group(Struct):
    id: int
    position: int  # in the stream of tasks, or among the held-out ones
    eta: int
    wanted: list[int]  # members that make up the group
    greedy: int | None = None  # the one of them that is sampled greedily, has no vote and is not trained
    exact_version: int | None = None  # evaluation: this version and no other
    asked: int = -1  # evaluation: the version it was asked for
    phase: Phase = "waiting"
    attempt: int = 0  # fences leases: raised whenever work is handed out anew
    failures: int = 0  # leases that a worker failed
    refilled: bool = False
    sampled: int | None = None  # version of the oldest token of `trajectories`
    youngest: int = -1  # version of the youngest token that votes, once the group is ready
    trajectories: dict[int, Outline] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    lease: Lease | None = None
    receipts: dict[Receipt, bool] = field(default_factory=dict)  # True: a result, False: given up

    @property
    def missing(self) -> list[int]:
        return [member for member in self.wanted if member not in self.trajectories]

    @property
    def unscored(self) -> list[int]:
        return [member for member in self.wanted if member in self.trajectories and member not in self.scores]

    @property
    def voters(self) -> list[int]:
        return [member for member in self.trained if member in self.scores and self.scores[member].votes]

    @property
    def trained(self) -> list[int]:
        return [member for member in self.wanted if member != self.greedy]

    @property
    def oldest(self) -> int | None:
        """No token of the group is older than this version; None while it has no token and no lease."""
        if self.lease is None or self.lease.id.stage == "score":
            return self.sampled
        return self.lease.oldest if self.sampled is None else min(self.sampled, self.lease.oldest)

    def youngest_vote(self) -> int:
        """Version of the youngest token of a voting member; -1 without one."""
        return max((self.trajectories[m].youngest for m in self.voters), default=-1)

    def phase_without_lease(self) -> Phase:
        if self.missing:
            return "waiting"
        return "generated" if self.unscored else "scored"


class Pool(Struct):
    """Groups by id and by phase. `phases` holds exactly the ids of `groups`, each once."""

    groups: dict[int, Group] = field(default_factory=dict)
    phases: dict[Phase, set[int]] = field(default_factory=lambda: {phase: set() for phase in PHASES})

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        self.phases[group.phase].add(group.id)

    def remove(self, group: Group) -> None:
        del self.groups[group.id]
        self.phases[group.phase].remove(group.id)

    def move(self, group: Group, phase: Phase) -> None:
        self.phases[group.phase].remove(group.id)
        group.phase = phase
        self.phases[phase].add(group.id)

    def in_order(self, phase: Phase) -> list[Group]:
        """The groups of a phase in the order of their admission."""
        return [self.groups[number] for number in sorted(self.phases[phase], key=abs)]

    def count(self, phase: Phase) -> int:
        return len(self.phases[phase])
