"""The vocabulary of the field: what travels between the services.

A *task* is a prompt with what is needed to grade an answer. A *group* is one task sampled G times; its
members are *trajectories*. A trajectory is token in, token out: what was sampled is what is trained, ids
are never decoded and encoded again. A *score* is what a grader says of a trajectory.

The policy version counts committed trainer steps; the initial model is version 0. A token's *lag*, when it
is used in step s, is s minus the version that sampled it.
"""

from typing import Any, Literal

import msgspec
import numpy as np

StopReason = Literal["eos", "length", "context", "turns", "tokens", "deadline", "invalid"]
"""`eos`: the model ended; `length`: max_new_tokens reached; `context`: the model's context was full. Of an episode also
the cap that ended it: on turns, on tokens, on time, on malformed turns in a row."""

ToolStatus = Literal["ok", "error", "malformed", "timeout"]
"""`error`: the tool raised; `malformed`: no call to be carried out; `timeout`: ended from outside."""

ScoreStatus = Literal["graded", "unparsed", "timeout", "abstained", "failed"]
"""`graded`, `unparsed` and `timeout` are the policy's doing and vote with their reward; `abstained` (the
grader gave None) and `failed` (an infrastructure fault) have no vote and no gradient."""

Spans = list[tuple[int, int]]
"""Run-length encoded versions of the action tokens, in order: [(version, count), ...]."""


EQUAL = 1e-6
"""Rewards of a group that differ by no more than this share of the largest are equal up to float noise."""


UNROUTED = -1
"""In `Sequence.routing`: the sampler could not tell, and the trainer's router chooses by itself."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt of a data set. `index` is its position in the run's stream of tasks."""

    index: int
    source: str
    messages: list[Message] | None = None  # rendered with the tokenizer's chat template
    prompt: str | None = None  # or plain text, encoded as it is
    answer: str | None = None
    metadata: dict[str, Any] = {}  # JSON values, handed to the grader

    def chat(self) -> list[dict[str, Any]]:
        """The prompt as messages, a list of one's own; plain text is one of the user."""
        if self.messages is None:
            return [{"role": "user", "content": self.prompt or ""}]
        return [{"role": m.role, "content": m.content} for m in self.messages]

    @property
    def text(self) -> str:
        """The prompt as a person reads it."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{m.role}: {m.content}" for m in self.messages or [])


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T tokens as the model read and sampled them, one behind the other."""

    tokens: np.ndarray  # [T] int32
    action: np.ndarray  # [T] bool, True where the policy sampled the token
    logprobs: np.ndarray  # [T] float32, behaviour log-probability (log_softmax(z / T)), 0 where not action
    versions: Spans  # of the action tokens, in order; counts add up to action.sum()
    survivors: np.ndarray | None = None  # [A, k] int32, ids that top_p / top_k kept per action token, -1 padded
    routing: np.ndarray | None = None  # [T - 1, layers, k] int8 or int16, the experts of all tokens but the last

    @property
    def actions(self) -> int:
        """A: tokens that the policy sampled."""
        return int(np.count_nonzero(self.action))

    def problems(self) -> str | None:
        """What is wrong with the shapes, or None."""
        length = self.tokens.shape[0] if self.tokens.ndim == 1 else -1
        if length < 1 or self.action.shape != (length,) or self.logprobs.shape != (length,):
            return f"tokens {self.tokens.shape}, action {self.action.shape}, logprobs {self.logprobs.shape} differ"
        counted = sum(count for _, count in self.versions)
        actions = self.actions
        if counted != actions or any(count < 1 or version < 0 for version, count in self.versions):
            return f"versions {self.versions} do not cover the {actions} action tokens"
        if actions < 1:
            return "no action token"
        if self.routing is not None and (self.routing.ndim != 3 or len(self.routing) != length - 1):
            return f"routing {self.routing.shape} of {length} tokens: it is of all but the last"
        return None


class ToolUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an episode, as it went."""

    name: str
    status: ToolStatus
    wall_s: float


class Trajectory(Sequence, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One member of a group: a completion, or an episode of many turns.

    An episode that went back to an earlier point, or asked in parallel, has `branches`: whole sequences, in which the
    tokens that another one has sampled already are no actions, so that they enter the loss once.
    """

    stop: StopReason
    text: str  # the last completion decoded for graders and people; never encoded again
    branches: list[Sequence] = []
    turns: int = 1  # completions sampled
    tools: list[ToolUse] = []
    reward: float | None = None  # what the episode itself gave

    @property
    def sequences(self) -> list[Sequence]:
        return [self, *self.branches]

    @property
    def spans(self) -> Spans:
        """Versions of the action tokens of all sequences, in their order."""
        return [span for sequence in self.sequences for span in sequence.versions]

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.spans)

    @property
    def sampled(self) -> int:
        """Action tokens of all sequences."""
        return sum(count for _, count in self.spans)

    @property
    def behaviour(self) -> np.ndarray:
        """[A] float32, log-probabilities of the action tokens of all sequences, in their order."""
        return np.concatenate([sequence.logprobs[sequence.action] for sequence in self.sequences])

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        of_each = ((s.tokens, s.action, s.logprobs, s.survivors, s.routing) for s in self.sequences)
        return sum(array.nbytes for arrays in of_each for array in arrays if array is not None)

    def problems(self) -> str | None:
        """What is wrong with the shapes of any sequence, or None."""
        found = (Sequence.problems(sequence) for sequence in self.sequences)
        return next((problem for problem in found if problem), None)


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grader's verdict. `reward` is None exactly where the member has no vote."""

    reward: float | None
    status: ScoreStatus = "graded"
    components: dict[str, float] = {}
    detail: str = ""

    @property
    def votes(self) -> bool:
        return self.reward is not None


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """[A] int64: the version that sampled each action token of all sequences, in their order."""
    versions = [version for version, _ in trajectory.spans]
    counts = [count for _, count in trajectory.spans]
    return np.repeat(np.asarray(versions, dtype=np.int64), np.asarray(counts, dtype=np.int64))


def token_lags(trajectory: Trajectory, step: int) -> np.ndarray:
    """[A] int64: lag of each action token when it is used in `step`."""
    lags: np.ndarray = step - token_versions(trajectory)
    return lags


def routing_dtype(experts: int) -> np.dtype[Any]:
    """The smallest that holds the ids of so many experts, and UNROUTED."""
    return np.dtype(np.int8 if experts <= 128 else np.int16)


def extend_spans(spans: Spans, version: int, count: int) -> None:
    """Append `count` tokens sampled at `version` to run-length encoded `spans`, in place."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1] = (version, spans[-1][1] + count)
    else:
        spans.append((version, count))
