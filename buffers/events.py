"""Everything that can happen to the buffer. `State.apply` of these, in order, gives the state again.

Training groups have ids from 0 on, in the order of their admission; evaluation groups count down from -1.
"""

from typing import Literal

import msgspec

from async_rl.buffers.group import Outline, Place
from async_rl.buffers.settings import Settings
from async_rl.protocol.buffer import LeaseId
from async_rl.trajectory import Score

Unwanted = Literal["equal", "hard", "easy"]
DropReason = Literal["stale", "end"] | Unwanted
FailReason = Literal["attempts", "min_valid"]


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every event: immutable, tagged by its class name."""


# --- a group's life ----------------------------------------------------------------------------------


class Admitted(Event, frozen=True):
    """A group begins. `again`: its task was waiting first in line, since a group of it went stale."""

    group: int
    position: int  # in the stream of tasks
    again: bool
    eta: int  # the bound that this group keeps


class Leased(Event, frozen=True):
    lease: LeaseId
    worker: str
    incarnation: str
    members: list[int]
    min_version: int  # oldest weights it may be sampled with; -1 for a score lease


class StartedAt(Event, frozen=True):
    """The oldest token of the lease has `version`."""

    lease: LeaseId
    version: int


class Generated(Event, frozen=True):
    lease: LeaseId
    member: int
    outline: Outline


class Scored(Event, frozen=True):
    lease: LeaseId
    member: int
    score: Score


class MemberFailed(Event, frozen=True):
    """The worker gave one member up; the lease goes on with the others."""

    lease: LeaseId
    member: int
    reason: str


class LeaseFailed(Event, frozen=True):
    """The worker gave the lease up."""

    lease: LeaseId
    reason: str


class LeaseReturned(Event, frozen=True):
    """A worker that stops hands its lease back: no attempt is counted."""

    lease: LeaseId


class Lapsed(Event, frozen=True):
    """The holder was silent for too long, or is dead."""

    lease: LeaseId
    reason: str


class Refilled(Event, frozen=True):
    """Members without a vote make room for new ones."""

    group: int
    out: list[int]
    fresh: list[int]


class Lost(Event, frozen=True):
    """What the journal kept of a member is damaged: it is generated again. Counts as no attempt."""

    group: int
    member: int
    reason: str


class Readied(Event, frozen=True):
    group: int


class Dropped(Event, frozen=True):
    """`stale`: its task comes back, first in line. `equal`, `hard`, `easy`: the filter's; another task's group
    takes its place."""

    group: int
    reason: DropReason


class Failed(Event, frozen=True):
    group: int
    reason: FailReason
    detail: str


# --- steps -------------------------------------------------------------------------------------------


class EpochRaised(Event, frozen=True):
    """A younger trainer: older ones are refused from here on."""

    epoch: int


class Drawn(Event, frozen=True):
    """`groups` in deadline and admission order, trained for steps `step` to `step` + reuse - 1."""

    step: int
    epoch: int
    groups: list[int]
    attempts: list[int]
    place: Place  # of the whole draw, a store.KeptDraw
    lowest: int  # first segment of the journal that its trajectories lie in


class StepCommitted(Event, frozen=True):
    """The policy version becomes `step` + 1."""

    step: int


class Checkpointed(Event, frozen=True):
    """No trainer begins again before `version`: older draws are not asked for any more."""

    version: int


class Restored(Event, frozen=True):
    """The run goes on from a checkpoint of `version`, without the journal of what led to it: `trained` groups
    did. `position`: of the next task, after those of `again`, which were under way."""

    version: int
    trained: int
    position: int
    again: list[int]


class SettingsChanged(Event, frozen=True):
    """The run was begun again under other settings, of those that may change."""

    settings: Settings


class EtaChanged(Event, frozen=True):
    """Governs admissions from here on; held groups keep theirs."""

    eta: int


# --- evaluation --------------------------------------------------------------------------------------


class EvaluationBegan(Event, frozen=True):
    """Groups `first`, `first` - 1, ... sample the held-out tasks 0, 1, ... at exactly `version`.

    An earlier attempt at the same `asked` version is given up, its results discarded."""

    asked: int
    version: int
    restarted: int
    first: int
    tasks: int
    samples: int


class Evaluated(Event, frozen=True):
    """A held-out task is done; samples without a score abstain."""

    group: int


# --- the end -----------------------------------------------------------------------------------------


class Closed(Event, frozen=True):
    """The run is over. `left`: positions of the tasks whose groups were dropped at its end, or had to come again."""

    reason: str
    left: list[int]


class Reopened(Event, frozen=True):
    """A run that was over or had broken goes on; the tasks that were left come first."""


class Broke(Event, frozen=True):
    """The run cannot go on."""

    reason: str


Any = (
    Admitted
    | Leased
    | StartedAt
    | Generated
    | Scored
    | MemberFailed
    | LeaseFailed
    | LeaseReturned
    | Lapsed
    | Refilled
    | Lost
    | Readied
    | Dropped
    | Failed
    | EpochRaised
    | Drawn
    | StepCommitted
    | Checkpointed
    | Restored
    | SettingsChanged
    | EtaChanged
    | EvaluationBegan
    | Evaluated
    | Closed
    | Reopened
    | Broke
)
"""The tagged union, for the journal's decoder."""
