"""The buffer's messages: leases and results for workers, draws for the trainer, evaluation.

A lease is fenced by (group, attempt, stage). Every request is idempotent, so a client that lost the
connection sends it again: `Finish` gets its first answer, `Draw` the same batch.
"""

from typing import Literal

import msgspec

from async_rl.config.schema import Sampling
from async_rl.protocol.base import Message
from async_rl.protocol.control import ControlReply, ControlRequest
from async_rl.trajectory import Score, Task, Trajectory

Stage = Literal["generate", "score"]
Outcome = Literal["accepted", "repeat", "refused", "revoked"]
"""`refused`: this one result cannot be taken, the rest of the lease goes on; `revoked`: the lease is gone."""


class LeaseId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: int
    attempt: int
    stage: Stage


class WorkerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's own counts since it started; they only grow."""

    up_s: float = 0.0
    busy_s: float = 0.0  # with at least one trajectory in flight, or one grading
    tokens: int = 0  # generated action tokens
    finished: int = 0  # trajectories generated, or graded
    updates: int = 0  # weight updates applied
    paused_s: float = 0.0  # generation stood still for them


# --- worker -> buffer --------------------------------------------------------------------------------


class Acquire(Message, frozen=True):
    """Ask for at most `n` trajectories' worth of leases (a group is never split); waits up to `wait_s` for the first.

    `worker` is the service's name, `incarnation` a random id of this process: a new incarnation of a name
    means that the old one is dead, and its leases lapse at once. `version`: the weights the worker holds
    (reward workers: -1).
    """

    worker: str
    incarnation: str
    stage: Stage
    n: int
    version: int
    wait_s: float


class Withdraw(Message, frozen=True):
    """What the worker asks for with Acquire is answered at once: it has newer weights to load. Answered with Done."""

    worker: str
    stage: Stage


class Leave(Message, frozen=True):
    """The worker has handed back what it held and goes; another may join under its name. Answered with Done."""

    worker: str
    incarnation: str


class Started(Message, frozen=True):
    """Sampling of the lease began at `version`; refused (`revoked`) where that is older than it may be."""

    worker: str
    incarnation: str
    lease: LeaseId
    version: int


class Extend(Message, frozen=True):
    """The worker is alive and holds these leases; each with the oldest version among its tokens so far."""

    worker: str
    incarnation: str
    leases: list[tuple[LeaseId, int]]
    stats: WorkerStats = WorkerStats()


class Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseId
    member: int
    trajectory: Trajectory


class Graded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseId
    member: int
    score: Score


class FinishGenerate(Message, frozen=True):
    """Results of one or more leases of the worker; answered with LeaseReplies, one each, in their order."""

    worker: str
    incarnation: str
    results: list[Sampled]


class FinishScore(Message, frozen=True):
    """Results of one or more leases of the worker; answered with LeaseReplies, one each, in their order."""

    worker: str
    incarnation: str
    results: list[Graded]


class Fail(Message, frozen=True):
    """An infrastructure fault of the worker, never of the policy. `member` None: the whole lease.

    `fault` False: a worker that stops hands its lease back, which counts as no attempt."""

    worker: str
    incarnation: str
    lease: LeaseId
    member: int | None
    reason: str
    fault: bool = True


# --- buffer -> worker --------------------------------------------------------------------------------


class GenerateLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generate the `members` of this group that are still missing."""

    id: LeaseId
    task: Task
    members: list[int]
    sampling: Sampling
    greedy: list[int]  # of the members: sampled at temperature 0
    min_version: int  # weights it may be sampled with, at least
    exact_version: int | None  # evaluation: this version and no other; defer updates until it is done


class ScoreLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: LeaseId
    task: Task
    trajectories: list[tuple[int, Trajectory]]  # (member, trajectory)


class Leases(Message, frozen=True):
    """What was granted; empty after `wait_s`. `ended`: the run is over, the worker may go."""

    generate: list[GenerateLease] = []
    score: list[ScoreLease] = []
    ended: bool = False


class LeaseReply(Message, frozen=True):
    """Answer to Started, Fail, and to each result. `revoked`: the lease is no longer the worker's; drop the work."""

    outcome: Outcome
    reason: str = ""


class LeaseReplies(Message, frozen=True):
    replies: list[LeaseReply]


class Extended(Message, frozen=True):
    """The leases that the worker must drop, with the reason."""

    revoked: list[tuple[LeaseId, str]] = []
    ended: bool = False


# --- trainer <-> buffer ------------------------------------------------------------------------------


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where version `version` stands in the data: tasks that are not trained come again, none is skipped."""

    version: int
    trained: int  # groups
    position: int  # next task of the stream, after those of `again`
    again: list[int]  # positions of the tasks that were admitted and are not trained
    data: dict[str, str]  # fingerprint of each source, as in the buffer's settings


class GetCursor(Message, frozen=True):
    """Answered with DataCursor, of the version that the buffer has now."""


class DataCursor(Message, frozen=True):
    cursor: Cursor


class Begin(Message, frozen=True):
    """A trainer began, with the weights of version `at`; those of a lower epoch are refused from here on.

    `cursor`: of the checkpoint it began with. A buffer that knows nothing of the run goes on from there."""

    epoch: int
    at: int
    cursor: Cursor | None = None


class Begun(Message, frozen=True):
    """The buffer's version. Where it is above the trainer's, the steps between them are to be made again: the
    draws are those that were."""

    version: int


class Checkpointed(Message, frozen=True):
    """No trainer begins again before `version`, the oldest checkpoint that is kept. Answered with Done."""

    version: int
    epoch: int


class Draw(Message, frozen=True):
    """Ask for the batch of `step`; waits up to `wait_s`. `epoch` fences old trainers out.

    A step that was made before gets the draw that it had."""

    step: int
    epoch: int
    wait_s: float


class DrawnMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    member: int
    trajectory: Trajectory
    score: Score


class DrawnGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: int
    attempt: int
    task: Task
    bound: int  # largest lag of a token in the loss: the eta of its admission, or hard_max under `correct`
    members: list[DrawnMember]
    greedy: DrawnMember | None = None  # ReMax: sampled greedily from the same prompt, never trained


class Drawn(Message, frozen=True):
    """The batch of `step`, in deadline and admission order."""

    step: int
    groups: list[DrawnGroup]
    dropped_stale: int  # groups dropped(stale) so far
    failed: int  # groups failed so far
    sequence: int = 0  # of `reuse`: this draw is trained for the (sequence + 1)-th time


class NotYet(Message, frozen=True):
    """No batch yet: what is missing, and the oldest lease with its holder."""

    reason: str


class DataEnded(Message, frozen=True):
    """No further step: the data ended or the run was closed."""

    reason: str


class FinishStep(Message, frozen=True):
    """The optimizer has made `step`; the policy version becomes step + 1."""

    step: int
    epoch: int


class StepFinished(Message, frozen=True):
    version: int


class Evaluate(Message, frozen=True):
    """Sample and score the held-out tasks with exactly the weights of `version`. Answered with Done."""

    version: int


class GetEvaluation(Message, frozen=True):
    """The report of the evaluation asked for at `version`; waits up to `wait_s`."""

    version: int
    wait_s: float


class SourceScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tasks: int
    mean_reward: float | None  # over voting samples; None without one
    truncated: float  # share of samples stopped by length


class EvaluationReport(Message, frozen=True):
    """`version`: what was really evaluated; younger than `asked` where that one was gone (restarted > 0)."""

    asked: int
    version: int
    restarted: int
    samples: int
    voting: int
    mean_reward: float | None
    sources: dict[str, SourceScore]


class Close(Message, frozen=True):
    """The run is over: what is held becomes dropped(end), workers are told to go."""

    reason: str


class GetBuffer(Message, frozen=True):
    pass


class BufferReport(Message, frozen=True):
    """The conservation line and everybody's work: admitted = trained + dropped + failed + held."""

    version: int
    admitted: int
    held: int
    trained: int
    dropped: dict[str, int]  # by reason
    failed: dict[str, int]
    states: dict[str, int]  # held groups by state
    conserved: bool
    lapsed: int  # leases that lapsed
    tokens: int  # action tokens of all trajectories taken in, those of evaluations too
    workers: dict[str, WorkerStats]  # by name, incarnations added up; of those that left, the sum of a kind
    worker_versions: dict[str, int]
    oldest_lease: str  # "group 17 (generate, attempt 0) held by rollout-0 for 3.2 s", or ""
    ended: bool


BufferRequest = (
    Acquire
    | Withdraw
    | Leave
    | Started
    | Extend
    | FinishGenerate
    | FinishScore
    | Fail
    | Begin
    | Draw
    | FinishStep
    | Checkpointed
    | GetCursor
    | Evaluate
    | GetEvaluation
    | Close
    | GetBuffer
    | ControlRequest
)
BufferReply = (
    Leases
    | LeaseReply
    | LeaseReplies
    | Extended
    | Drawn
    | NotYet
    | DataEnded
    | StepFinished
    | Begun
    | DataCursor
    | EvaluationReport
    | BufferReport
    | ControlReply
)
