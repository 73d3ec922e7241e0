"""The trainer on a device of its own, or taking turns on one with the engines (`placement = "shared"`).

async with device.turn():      # the engines sleep, the weights and the optimizer of every role are on the device
    ...                        # else they are in the host's memory: published, saved and waited with from there
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from async_rl.config.placement import refuse
from async_rl.config.schema import Config
from async_rl.device_lock import DeviceLock
from async_rl.models.moving import give_back, move, tensors_of
from async_rl.rundir import RunDir
from async_rl.services.trainer.roles import Roles

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
log = logging.getLogger(__name__)


class Turns(Protocol):
    def turn(self) -> contextlib.AbstractAsyncContextManager[None]: ...


class Apart:
    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()


class Shared:
    """roles: what to move, None before they are loaded. in_thread: runs all of torch's work."""

    def __init__(self, config: Config, run: RunDir, roles: Callable[[], Roles | None], in_thread: InThread) -> None:
        refuse(config)
        self._lock, self._device = DeviceLock(config, run), config.trainer.device
        self._wait_s = config.trainer.draw_wait_s
        self._roles, self._in_thread = roles, in_thread

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """After an error or a cancellation in the middle the device stays taken: a thread may still be at work there,
        and the process ends."""
        await self._lock.take(alone=True, deadline_s=self._wait_s, setting="trainer.draw_wait_s")
        log.info("trainer takes %s", self._device)
        await self._in_thread(self.onload)
        yield
        await self._in_thread(self.offload)
        log.info("trainer leaves %s", self._device)
        self._lock.release()

    def onload(self) -> None:
        roles = self._roles()
        if roles is not None:
            move(tensors(roles), self._device)

    def offload(self) -> None:
        roles = self._roles()
        if roles is not None:
            move(tensors(roles), "cpu")
            give_back(self._device)


def turns(config: Config, run: RunDir, roles: Callable[[], Roles | None], in_thread: InThread) -> Turns:
    return Shared(config, run, roles, in_thread) if config.placement == "shared" else Apart()


def tensors(roles: Roles) -> Iterator[Tensor]:
    """All that a step has on the device between two updates: parameters, gradients, buffers, optimizer."""
    learners = [roles.policy, *roles.beside().values()]
    for network in (roles.reference, roles.teacher, *learners):
        if network is not None:
            yield from tensors_of(network.model)
    for learner in learners:
        yield from learner.optimizer_tensors().values()
