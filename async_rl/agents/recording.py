"""What really went through the model in one episode, token by token. Pure.

Each call is (prompt, completion). A prompt that goes on where a sequence ended is appended to it; any other begins a
branch: a sequence of its own, in which only what is sampled now is an action. So every sampled token is an action
exactly once, and nothing that was not sampled ever is.
"""

from collections.abc import Sequence as Many

import numpy as np

from async_rl.trajectory import Sequence, Spans, StopReason, ToolUse, Trajectory, extend_spans


class Branch:
    """A sequence in the making, T tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.action: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: Spans = []
        self.survivors: list[list[int]] = []
        self.routing: list[np.ndarray] = []  # [tokens, layers, k] each, one behind the other

    def continues(self, prompt: Many[int]) -> bool:
        """Whether `prompt` begins with all of this."""
        return len(prompt) >= len(self.tokens) and list(prompt[: len(self.tokens)]) == self.tokens

    def append(
        self,
        prompt: Many[int],
        tokens: Many[int],
        logprobs: Many[float],
        versions: Spans,
        survivors: list[list[int]] | None,
        routing: np.ndarray | None = None,
    ) -> None:
        """`prompt` whole, what is here already included."""
        read = list(prompt[len(self.tokens) :])
        self.tokens += [*read, *tokens]
        self.action += [False] * len(read) + [True] * len(tokens)
        self.logprobs += [0.0] * len(read) + list(logprobs)
        for version, count in versions:
            extend_spans(self.versions, version, count)
        self.survivors += survivors or []
        if routing is not None:  # of what an earlier turn has sampled, as it was sampled
            self.routing.append(routing[sum(map(len, self.routing)) :])

    def frozen(self) -> Sequence:
        return Sequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            action=np.array(self.action, dtype=bool),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=self.versions,
            survivors=padded(self.survivors) if self.survivors else None,
            routing=np.concatenate(self.routing) if self.routing else None,
        )


class Recording:
    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.turns = 0
        self.tools: list[ToolUse] = []

    @property
    def sampled(self) -> int:
        """Action tokens so far."""
        return sum(count for branch in self.branches for _, count in branch.versions)

    def add(
        self,
        prompt: Many[int],
        tokens: Many[int],
        logprobs: Many[float],
        versions: Spans,
        survivors: list[list[int]] | None = None,
        routing: np.ndarray | None = None,
    ) -> None:
        """One call, `tokens` being what was sampled behind `prompt`."""
        self.turns += 1
        going_on = [branch for branch in self.branches if branch.continues(prompt)]
        if not going_on:
            self.branches.append(Branch())
        branch = max(going_on, key=lambda b: len(b.tokens), default=self.branches[-1])
        branch.append(prompt, tokens, logprobs, versions, survivors, routing)

    def trajectory(self, stop: StopReason, text: str, reward: float | None) -> Trajectory:
        """The whole episode; it has sampled something."""
        first, *rest = [branch.frozen() for branch in self.branches]
        return Trajectory(
            tokens=first.tokens,
            action=first.action,
            logprobs=first.logprobs,
            versions=first.versions,
            survivors=first.survivors,
            routing=first.routing,
            stop=stop,
            text=text,
            branches=rest,
            turns=self.turns,
            tools=self.tools,
            reward=reward,
        )


def padded(rows: Many[Many[int]]) -> np.ndarray:
    """[rows, longest] int32, -1 behind each row's ids."""
    table = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table
