"""The engine on a device of its own, or taking turns on one with the trainer (`placement = "shared"`)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from async_rl.config.placement import refuse
from async_rl.config.schema import Config
from async_rl.device_lock import DeviceLock
from async_rl.rundir import RunDir
from async_rl.services.rollout.engine import Engine
from async_rl.services.rollout.turn import Turn

GRANT_S = 0.5  # how long the buffer may look for work
REST_S = 0.1  # the same, while the trainer may be waiting for the device
log = logging.getLogger(__name__)


class Device(Protocol):
    @property
    def awake(self) -> bool:
        """The engine may sample and be updated."""

    @property
    def ask_s(self) -> float:
        """How long the buffer may look for work."""

    @property
    def resting(self) -> bool:
        """Awake without work: an answer without leases puts the engine to sleep."""

    async def reserve(self, wanted: Callable[[], bool]) -> bool:
        """Before the engine is built. False where it is not wanted any more."""

    async def keep(self, engine: Engine) -> None:
        """Wakes the engine for work and puts it to sleep after, for ever."""

    def told_nothing(self) -> None:
        """The buffer had nothing for a worker that was resting."""

    def release(self) -> None:
        """The engine is closed."""


class Apart:
    awake, ask_s, resting = True, GRANT_S, False

    async def reserve(self, wanted: Callable[[], bool]) -> bool:
        return True

    async def keep(self, engine: Engine) -> None: ...

    def told_nothing(self) -> None: ...

    def release(self) -> None: ...


class Shared:
    """has_work: a lease is held, or a newer version is to be loaded. changed: set when that may have changed, and here
    when the engine has woken."""

    def __init__(
        self, config: Config, run: RunDir, name: str, has_work: Callable[[], bool], changed: asyncio.Event
    ) -> None:
        refuse(config)
        self._lock, self._wait_s, self._name = DeviceLock(config, run), config.services.lease_max_s, name
        self._has_work, self._changed = has_work, changed
        self._turn = Turn()

    @property
    def awake(self) -> bool:
        return self._turn.phase == "awake"

    @property
    def ask_s(self) -> float:
        return REST_S if self.awake else GRANT_S

    @property
    def resting(self) -> bool:
        return self.awake and not self._has_work()

    async def reserve(self, wanted: Callable[[], bool]) -> bool:
        return await self._take(wanted)

    async def keep(self, engine: Engine) -> None:
        self.told_nothing()  # the first weights may be long in coming
        while True:
            match self._turn.move(self._has_work()):
                case "take":
                    if await self._take(self._has_work):
                        self._turn.took()
                case "wake":
                    await engine.wake()
                    self._turn.woke()
                    self._changed.set()
                case "sleep":
                    await engine.sleep()
                    self._turn.slept()
                    log.info("%s leaves %s", self._name, self._lock.device)
                    self._lock.release()
                case None:
                    self._changed.clear()
                    await self._changed.wait()

    def told_nothing(self) -> None:
        self._turn.told_nothing(self._has_work())
        self._changed.set()

    def release(self) -> None:
        self._lock.release()

    async def _take(self, wanted: Callable[[], bool]) -> bool:
        setting = "services.lease_max_s"
        took = await self._lock.take(alone=False, deadline_s=self._wait_s, setting=setting, wanted=wanted)
        if took:
            log.info("%s takes %s", self._name, self._lock.device)
        return took


def device(config: Config, run: RunDir, name: str, has_work: Callable[[], bool], changed: asyncio.Event) -> Device:
    return Shared(config, run, name, has_work, changed) if config.placement == "shared" else Apart()
