"""An engine without a model: scripted latency, for tests of orchestration.

Each request gets `tokens_per_s` tokens a second, whatever runs beside it, and a log-normal number of them.
Ids below `vocabulary` are noise that decodes to nothing; vocabulary + n is the character of code n.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

from async_rl.config.schema import FakeEngine as Settings
from async_rl.config.schema import Sampling
from async_rl.errors import EngineDied
from async_rl.services.rollout.engine import Completion, Draft, ReadWeights, Weights
from async_rl.trajectory import StopReason, Task

WRONG = "?"
CONTEXT = 2**20


class FakeText:
    """The prompt is the task's answer, so that the engine can give it."""

    ends: frozenset[int] = frozenset()
    parser = "hermes"

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def encode(self, task: Task) -> list[int]:
        return [self._vocabulary + ord(c) for c in task.answer or WRONG]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(t - self._vocabulary) for t in tokens if t >= self._vocabulary)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], header: bool) -> str:
        turns = [f"[{message['role']}]{message['content']}\n" for message in messages]
        return "".join(turns) + ("[assistant]" if header else "")

    def encode_text(self, text: str) -> list[int]:
        return [self._vocabulary + ord(c) for c in text]

    decode_all = decode


class _Script:
    """What a request will have said, and by when."""

    def __init__(self, tokens: list[int], draft: Draft, began_s: float) -> None:
        self.tokens, self.draft, self.began_s = tokens, draft, began_s

    def catch_up(self, now_s: float, tokens_per_s: float) -> None:
        due = min(int((now_s - self.began_s) * tokens_per_s + 1e-6), len(self.tokens))
        fresh = self.tokens[len(self.draft.tokens) : due]
        self.draft.tokens.extend(fresh)
        self.draft.logprobs.extend([-1.0] * len(fresh))


class FakeEngine:
    """An Engine."""

    returns_survivors = False
    returns_routing = False
    context = CONTEXT

    def __init__(self, settings: Settings) -> None:
        self.version = -1
        self._settings = settings
        self._scripts: set[_Script] = set()
        self._open = asyncio.Event()  # no update is under way
        self._open.set()
        self._turn = asyncio.Lock()
        self._stood_s = 0.0
        self._closed = False
        self.asleep = False

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        greedy: bool = False,
        seed: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        draft = draft or Draft()
        await self._open.wait()
        self._require_awake()
        draft.mark(self.version)
        script = _Script(self._tokens(prompt, sampling, random.Random(seed)), draft, self._now())
        self._scripts.add(script)
        try:
            while len(draft.tokens) < len(script.tokens):
                left = script.began_s + len(script.tokens) / self._settings.tokens_per_s - self._now()
                await asyncio.sleep(max(left, 0.0))
                await self._open.wait()
                if self._closed:
                    raise EngineDied("fake engine: closed")
                script.catch_up(self._now(), self._settings.tokens_per_s)
        finally:
            self._scripts.discard(script)
        stop: StopReason = "length" if len(script.tokens) >= sampling.max_new_tokens else "eos"
        return draft.completion(stop)

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        async with self._turn:
            self._require_awake()
            began = asyncio.get_running_loop().time()
            self._catch_up()
            self._open.clear()
            try:
                self.version = await read(_ignore)
                if not keep_cache:
                    for script in self._scripts:
                        script.draft.mark(self.version)
            finally:
                self._stood_s += asyncio.get_running_loop().time() - began
                self._open.set()

    async def sleep(self) -> None:
        if self._scripts:
            raise EngineDied(f"fake engine: put to sleep with {len(self._scripts)} requests in flight")
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def close(self) -> None:
        self._closed = True

    def _require_awake(self) -> None:
        if self.asleep:
            raise EngineDied("fake engine: used while it sleeps")

    def _catch_up(self) -> None:
        for script in self._scripts:
            script.catch_up(self._now(), self._settings.tokens_per_s)

    def _now(self) -> float:
        """Seconds of generation, updates left out."""
        return asyncio.get_running_loop().time() - self._stood_s

    def _tokens(self, prompt: list[int], sampling: Sampling, chance: random.Random) -> list[int]:
        length = round(self._settings.median_tokens * math.exp(self._settings.sigma * chance.gauss(0.0, 1.0)))
        length = max(1, min(length, sampling.max_new_tokens))
        right = chance.random() < self._settings.accuracy
        answer = prompt if right and len(prompt) <= length else [self._settings.vocabulary + ord(WRONG)]
        noise = [chance.randrange(self._settings.vocabulary) for _ in range(length - len(answer))]
        return noise + answer


async def _ignore(weights: Weights) -> None:
    """There is nothing to write them to."""
