"""The rollout service.

_lease     acquires groups while there is room                 waits for: room, a grant
_group     samples one group's members and hands each in       waits for: the engine
_beat      says what it holds, drops what was revoked          every third of a lease, once a second at least
_device    wakes the engine for work where the trainer has the same device, and puts it to sleep after
_follow    brings the weights up to the trainer's              waits for: a newer version; then, where
           weights must not change under running requests, acquires nothing and waits until all are done
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from async_rl.actor.outbox import Outbox
from async_rl.actor.remote import Remote
from async_rl.actor.service import Service
from async_rl.config.modes import bounds, trajectories
from async_rl.config.schema import Config
from async_rl.errors import (
    AsyncRLError,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    PeerRefused,
    PublicationError,
    WorkRevoked,
)
from async_rl.protocol.buffer import (
    Acquire,
    BufferReply,
    BufferRequest,
    Extend,
    Extended,
    Fail,
    FinishGenerate,
    LeaseId,
    LeaseReplies,
    LeaseReply,
    Leases,
    Leave,
    Sampled,
    Started,
    Withdraw,
)
from async_rl.protocol.control import ControlReply, ControlRequest, Done
from async_rl.protocol.weight_sync import WeightSyncReply, WeightSyncRequest
from async_rl.services.rollout import environments
from async_rl.services.rollout.backends import build
from async_rl.services.rollout.device import device
from async_rl.services.rollout.engine import Apply, Engine
from async_rl.services.rollout.held import Held, Ledger, seed_of
from async_rl.services.rollout.member import Sampler
from async_rl.services.rollout.meter import Meter
from async_rl.weights.relays import relay_of

if TYPE_CHECKING:
    from async_rl.weights.reader import Received, Subscriber

FETCH_S = 5.0
REFUSAL_S = 0.5

R = TypeVar("R")
log = logging.getLogger(__name__)


class RolloutService(Service):
    kind = "rollout"
    requests = ControlRequest
    replies = ControlReply

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        room, self._size = config.rollout.max_in_flight, trajectories(config)
        if room < self._size:
            raise ConfigError(
                f"rollout.max_in_flight = {room} is below the {self._size} trajectories of a group "
                f"(batch.group_size = {config.batch.group_size}): no group fits"
            )
        self._bounds = bounds(config)
        self._ledger = Ledger()
        self._results = Outbox(self._finish, lambda sampled: sampled.trajectory.nbytes)
        self._tasks: dict[LeaseId, asyncio.Task[None]] = {}
        self._meter = Meter(time.monotonic())
        self._granting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._refusals = 0  # publications in a row that could not be taken
        self._newer = False  # a version is out that this worker has yet to load
        self._ended = False
        self._device = device(config, self.run, name, self._has_work, self._changed)
        self._engine: Engine
        self._sampler: Sampler
        self._buffer: Remote
        self._weights: Subscriber

    async def work(self) -> None:
        from async_rl.weights.reader import Subscriber

        if not await self._device.reserve(lambda: not self.stopping.is_set()):
            return
        self._engine, text = await build(self.config)
        try:
            async with (
                contextlib.AsyncExitStack() as resources,
                self.remote("buffer", BufferRequest, BufferReply) as self._buffer,
                self.remote("weight_sync", WeightSyncRequest, WeightSyncReply, name=self._relay) as weight_sync,
            ):
                episodes = await environments.build(self.config, text, self._engine.context, resources)
                self._sampler = Sampler(self._engine, text, episodes)
                self._weights = Subscriber(weight_sync, self.name, self.incarnation)
                async with asyncio.TaskGroup() as tasks:
                    helpers = [
                        tasks.create_task(self._device.keep(self._engine), name=f"{self.name} device"),
                        tasks.create_task(self._notice_stop(), name=f"{self.name} stop"),
                    ]
                    joined = await self._first_weights()
                    if joined:
                        for work in (self._beat, self._follow):
                            helpers.append(tasks.create_task(work(), name=f"{self.name} {work.__name__}"))
                        await self._lease(tasks)
                    for task in [*helpers, *self._tasks.values()]:
                        task.cancel()
                    if joined and not self._ended:
                        await self._hand_back()
        finally:
            await self._engine.close()
            self._device.release()

    def detail(self) -> dict[str, float | int | str]:
        stats = self._meter.stats(time.monotonic())
        return {"in_flight": self._meter.in_flight, "tokens": stats.tokens, "finished": stats.finished}

    # --- leases --------------------------------------------------------------------------------------

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        """Until the run has ended or a stop is asked for."""
        while True:
            await self._until(lambda: self._leaving or self._has_room)
            if self._leaving:
                return
            async with self._granting:
                version, wait_s, resting = self._engine.version, self._device.ask_s, self._device.resting
                request = Acquire(self.name, self.incarnation, "generate", self._room, version, wait_s)
                granted = await self._ask(request, Leases, wait_s=wait_s)
                for lease in granted.generate:
                    held = self._ledger.held[lease.id] = Held(lease, version)
                    self._tasks[lease.id] = tasks.create_task(self._group(held), name=f"group {lease.id.group}")
            self._ended = self._ended or granted.ended
            if granted.generate:
                self._changed.set()
            elif resting and not self._ended:
                self._device.told_nothing()

    async def _group(self, held: Held) -> None:
        lease = held.lease
        try:
            unfit = self._sampler.unfit(lease.task)
            if unfit is not None:
                await self._fail(lease.id, None, unfit)
                return
            await self._until(lambda: self._device.awake)
            started = Started(self.name, self.incarnation, lease.id, self._engine.version)
            if (await self._ask(started, LeaseReply)).outcome == "revoked":
                return
            async with asyncio.TaskGroup() as members:
                for member in lease.members:
                    members.create_task(self._member(held, member), name=f"member {member}")
        except* WorkRevoked as revoked:
            log.info("%s: group %d: %s", self.name, lease.id.group, revoked.exceptions[0])
        finally:
            self._ledger.held.pop(lease.id, None)
            self._tasks.pop(lease.id, None)
            self._changed.set()

    async def _member(self, held: Held, member: int) -> None:
        lease = held.lease
        self._meter.begin(time.monotonic())
        try:
            result = await self._sampler.sample(
                lease.task,
                lease.sampling,
                greedy=member in lease.greedy,
                seed=partial(seed_of, self.config.seed, lease, member),
                drafts=held.drafts[member],
            )
        except EngineDied:
            raise
        except Exception as error:  # of this member alone; the others go on
            log.warning("%s: group %d member %d failed", self.name, lease.id.group, member, exc_info=error)
            await self._fail(lease.id, member, f"{type(error).__name__}: {error}")
            return
        finally:
            self._meter.end(time.monotonic())
            held.open.discard(member)
            self._changed.set()
        reply = await self._results.hand_in(Sampled(lease.id, member, result))
        if reply.outcome == "revoked":
            raise WorkRevoked(reply.reason)
        if reply.outcome == "refused":
            log.warning("%s: group %d member %d: %s", self.name, lease.id.group, member, reply.reason)
        self._meter.finished(result.sampled)

    async def _finish(self, results: list[Sampled]) -> list[LeaseReply]:
        return (await self._ask(FinishGenerate(self.name, self.incarnation, results), LeaseReplies)).replies

    async def _beat(self) -> None:
        every_s = min(self.config.services.lease_s / 3, 1.0)
        while True:
            stats = self._meter.stats(time.monotonic())
            reply = await self._ask(Extend(self.name, self.incarnation, self._ledger.progress(), stats), Extended)
            for lease, reason in reply.revoked:
                if lease in self._tasks:
                    log.info("%s: group %d: revoked: %s", self.name, lease.group, reason)
                    self._tasks[lease].cancel()
            if reply.ended:
                self._ended = True
                self._changed.set()
            await asyncio.sleep(every_s)

    async def _hand_back(self) -> None:
        """What is not done goes to another worker at once, not when the lease lapses."""
        returns = [self._fail(lease, None, "worker stops", fault=False) for lease in list(self._ledger.held)]
        await asyncio.gather(*returns)
        with contextlib.suppress(TimeoutError, AsyncRLError):  # a buffer that is gone forgets it by itself
            async with asyncio.timeout(self.config.services.stop_s / 2):
                await self._ask(Leave(self.name, self.incarnation), Done)

    async def _fail(self, lease: LeaseId, member: int | None, reason: str, *, fault: bool = True) -> None:
        await self._ask(Fail(self.name, self.incarnation, lease, member, reason, fault), LeaseReply)

    # --- weights -------------------------------------------------------------------------------------

    def _relay(self) -> str | None:
        return relay_of(self.config, self.run, int(self.name.rpartition("-")[2]))

    async def _first_weights(self) -> bool:
        """Nothing is sampled before the trainer's weights are here. False: stopped first."""
        deadline_s = self.config.services.connect_s + self.config.weight_sync.publish_s
        end = time.monotonic() + deadline_s
        while not self.stopping.is_set():
            received = await self._weights.fetch(-1, 1.0)
            self._newer = received is not None
            if received is not None and self._device.awake:
                await self._update(received)
                self._newer = False
                log.info("%s begins with version %d", self.name, self.version)
                return True
            if received is not None:
                await self._weights.release(received)
                self._changed.set()
                await self._until(lambda: self._device.awake or self.stopping.is_set())
                continue
            if time.monotonic() > end:
                setting = "services.connect_s + weight_sync.publish_s"
                raise DeadlineExceeded("the trainer's first weights", deadline_s, setting)
        return False

    async def _follow(self) -> None:
        while True:
            received = await self._weights.fetch(self._engine.version, FETCH_S)
            self._newer = received is not None
            self._changed.set()
            if received is None:
                continue
            # No lease is granted for weights just replaced: what is asked for comes back first.
            await self._buffer.tell(Withdraw(self.name, "generate"))
            async with self._granting:
                if self._may_update():
                    await self._try_update(received)
                    continue
            # Nobody sits on a slot of the relay: by the time this worker is done, there may be a newer one.
            await self._weights.release(received)
            await self._until(self._may_update)

    async def _try_update(self, received: "Received") -> None:
        """A version that cannot be taken leaves the worker on its old one; a few in a row are too many."""
        try:
            await self._update(received)
        except PublicationError as error:
            self._refusals += 1
            if self._refusals >= self.config.services.max_failures:
                raise
            log.warning("%s: stays at version %d: %s", self.name, self.version, error)
            await asyncio.sleep(REFUSAL_S)
            return
        self._refusals = 0
        self._newer = False
        self._changed.set()

    async def _update(self, received: "Received") -> None:
        async def read(apply: Apply) -> int:
            current = received
            while True:
                await apply(current)
                if await self._weights.release(current):
                    return current.version
                current = await self._replacement()

        began = time.monotonic()
        await self._engine.update(read, keep_cache=self._bounds.keep_cache)
        self.version = self._engine.version
        self._meter.updated(time.monotonic() - began)

    async def _replacement(self) -> "Received":
        """For weights taken back while they were read."""
        deadline_s = self.config.weight_sync.publish_s
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            received = await self._weights.fetch(-1, FETCH_S)
            if received is not None:
                return received
        raise DeadlineExceeded("weights to replace those taken back", deadline_s, "weight_sync.publish_s")

    def _may_update(self) -> bool:
        return self._device.awake and self._ledger.may_update(self._bounds.in_flight)

    def _has_work(self) -> bool:
        return self._newer or bool(self._ledger.held)

    # --- waiting -------------------------------------------------------------------------------------

    @property
    def _leaving(self) -> bool:
        return self._ended or self.stopping.is_set()

    @property
    def _room(self) -> int:
        return self.config.rollout.max_in_flight - self._ledger.in_flight

    @property
    def _has_room(self) -> bool:
        draining = self._newer and not self._bounds.in_flight
        return not draining and self._room >= self._size

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    async def _notice_stop(self) -> None:
        await self.stopping.wait()
        self._changed.set()

    async def _ask(self, message: Any, kind: type[R], *, wait_s: float = 0.0) -> R:
        reply = await self._buffer.ask(message, wait_s=wait_s)
        if not isinstance(reply, kind):
            raise PeerRefused(f"buffer answered {type(message).__name__} with {type(reply).__name__}")
        return reply
