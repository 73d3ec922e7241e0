"""Several engines as one: a prompt goes where its beginning is cached, else where there is least to do.

Prompts are cut into blocks; a block is known by the hash of all tokens up to its end, so the members of a group and the
turns of an episode find the engine that has computed what they begin with. An engine that is much busier than the
least busy one gets nothing for its cache's sake (the rule of SGLang's router).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from async_rl.config.schema import Sampling
from async_rl.errors import InvariantError
from async_rl.services.rollout.engine import Apply, Completion, Draft, Engine, ReadWeights, Weights

BLOCK = 16  # tokens
REMEMBERED = 65_536  # blocks of an engine
IMBALANCE = 8  # requests that an engine may have more than the least busy one
RATIO = 1.5  # and so many times as many


class Router:
    """Which of `engines` engines a prompt goes to. Pure."""

    def __init__(self, engines: int) -> None:
        self.load = [0] * engines
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]

    def choose(self, prompt: Sequence[int]) -> int:
        """The engine, which has one request more from now on."""
        blocks = _blocks(prompt)
        least = min(self.load)
        free = [k for k, load in enumerate(self.load) if load - least <= IMBALANCE or load <= RATIO * least]
        chosen = max(free, key=lambda k: (self._depth(k, blocks), -self.load[k], -k))
        self.load[chosen] += 1
        self._remember(chosen, blocks)
        return chosen

    def done(self, engine: int, tokens: Sequence[int]) -> None:
        """A request has ended, its prompt and completion being `tokens`."""
        self.load[engine] -= 1
        self._remember(engine, _blocks(tokens))

    def forget(self) -> None:
        """All caches are dropped."""
        for known in self._known:
            known.clear()

    def _depth(self, engine: int, blocks: list[int]) -> int:
        known = self._known[engine]
        return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, engine: int, blocks: list[int]) -> None:
        known = self._known[engine]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)


def _blocks(tokens: Sequence[int]) -> list[int]:
    found, chain = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hash((chain, *tokens[end - BLOCK : end]))
        found.append(chain)
    return found


class Engines:
    """An Engine made of several of one kind, all of one version."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._router = Router(len(self._engines))
        self.context = min(engine.context for engine in self._engines)
        self.returns_survivors = all(engine.returns_survivors for engine in self._engines)
        self.returns_routing = all(engine.returns_routing for engine in self._engines)

    @property
    def version(self) -> int:
        return min(engine.version for engine in self._engines)

    @version.setter
    def version(self, version: int) -> None:
        for engine in self._engines:
            engine.version = version

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        greedy: bool = False,
        seed: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        chosen = self._router.choose(prompt)
        draft = draft or Draft()
        try:
            return await self._engines[chosen].generate(prompt, sampling, greedy=greedy, seed=seed, draft=draft)
        finally:
            self._router.done(chosen, prompt + draft.tokens)

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        """All stand still, then the weights are read once, then all go on. PublicationError where they do not fit any:
        they are of one model, so all have refused them."""
        together = _Together(read, len(self._engines))
        try:
            async with asyncio.TaskGroup() as updates:
                for engine in self._engines:
                    updates.create_task(engine.update(together.read, keep_cache=keep_cache))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if not keep_cache:
            self._router.forget()
        versions = {engine.version for engine in self._engines}
        if len(versions) > 1:
            raise InvariantError(f"engines of one service have the versions {sorted(versions)}")

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self._engines))
        self._router.forget()

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self._engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class _Together:
    """One reading of the weights for several engines."""

    def __init__(self, read: ReadWeights, engines: int) -> None:
        self._read, self._missing = read, engines
        self._applies: list[Apply] = []
        self._version: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def read(self, apply: Apply) -> int:
        """Waits until all engines stand still; the last to come reads."""
        self._applies.append(apply)
        self._missing -= 1
        if self._missing:
            return await asyncio.shield(self._version)
        try:
            version = await self._read(self._apply)
        except BaseException as error:
            if not self._version.done():
                self._version.set_exception(error)
                self._version.exception()  # the others may be gone
            raise
        self._version.set_result(version)
        return version

    async def _apply(self, weights: Weights) -> None:
        await asyncio.gather(*(apply(weights) for apply in self._applies))
