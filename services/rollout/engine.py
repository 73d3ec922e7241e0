"""The seam between the rollout service and what samples tokens."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from async_rl.config.schema import Sampling
from async_rl.errors import EngineFault
from async_rl.protocol.weight_sync import Manifest
from async_rl.trajectory import Spans, StopReason, extend_spans


class Completion(msgspec.Struct, frozen=True):
    """What was sampled behind one prompt, A tokens."""

    tokens: list[int]  # the end token included, where it was sampled
    logprobs: list[float]  # of each token, under the distribution it was sampled from
    versions: Spans  # counts add up to A
    stop: StopReason
    survivors: list[list[int]] | None = None  # per token, the ids that top_p and top_k kept
    routing: np.ndarray | None = None  # [prompt + A - 1, layers, k], as in trajectory.Sequence


class Draft:
    """A completion in the making. The engine appends; anyone may look.

    A mark (version, n) says: the cache behind the tokens from the n-th on began under that version, so none
    of them depends on older weights.
    """

    __slots__ = ("logprobs", "marks", "routing", "survivors", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.survivors: list[list[int]] = []
        self.routing: list[np.ndarray] = []  # [layers, k] each, from the prompt's first token on
        self.marks: list[tuple[int, int]] = []

    def mark(self, version: int) -> None:
        """Tokens from here on are of `version`."""
        self.marks.append((version, len(self.tokens)))

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the tokens so far, else the next token's; None before an engine had it."""
        if self.tokens:
            return min(version for version, _ in self.versions())
        return self.marks[-1][0] if self.marks else None

    def versions(self) -> Spans:
        spans: Spans = []
        ends = [*(start for _, start in self.marks[1:]), len(self.tokens)]
        for (version, start), end in zip(self.marks, ends, strict=False):
            extend_spans(spans, version, end - start)
        return spans

    def completion(self, stop: StopReason) -> Completion:
        routing = np.stack(self.routing) if self.routing else None
        return Completion(self.tokens, self.logprobs, self.versions(), stop, self.survivors or None, routing)


def room(prompt: list[int], sampling: Sampling, context: int) -> int:
    """New tokens that may follow `prompt`; EngineFault where none may."""
    limit = min(sampling.max_new_tokens, context - len(prompt))
    if limit < 1:
        raise EngineFault(f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    return limit


def cut_by(tokens: int, sampling: Sampling) -> StopReason:
    """Which limit ended a completion of `tokens` tokens, where one did."""
    return "length" if tokens >= sampling.max_new_tokens else "context"


class Weights(Protocol):
    """One version of the weights, as the relay gave it out."""

    version: int

    @property
    def manifest(self) -> Manifest: ...

    @property
    def path(self) -> str:
        """Of the file in shared memory that the manifest's offsets are in."""

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of a tensor -> its name in `tensors` (tied embeddings)."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor on the CPU), valid while the weights are not released."""


Apply = Callable[[Weights], Awaitable[None]]
ReadWeights = Callable[[Apply], Awaitable[int]]
"""Applies weights, again where they were taken back while they were read; returns the version that holds."""


class Engine(Protocol):
    """Samples completions. Attributes tell what the service must know of it."""

    version: int  # of the weights; -1 before the first update
    context: int  # tokens of prompt and completion together
    returns_survivors: bool  # whether it can say which ids top_p and top_k kept
    returns_routing: bool  # whether it says which experts its routers chose

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        greedy: bool = False,
        seed: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        """Sample one completion: the same for the same seed, prompt and weights, whatever runs beside it.

        `draft` shows it in the making. Cancelling the task cancels the request. Raises EngineFault where this
        request failed, EngineDied where all did.
        """

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        """Stand still, let `read` apply newer weights, go on with the requests in flight under them.

        The KV cache is computed again; with `keep_cache` it stays, and tokens sampled with it keep the oldest
        version in it. Raises PublicationError where the weights do not fit, with the old ones untouched.
        """

    async def sleep(self) -> None:
        """Leave the device: weights to the host's memory, the cache dropped. Without requests, and until `wake` there
        is no update either."""

    async def wake(self) -> None:
        """Back on the device, under the weights of before."""

    async def close(self) -> None:
        """Drop every request and end. May be called twice."""
