"""The reward service: acquire leases, grade their members in the pool, finish each with its score."""

import asyncio
import contextlib
import logging
import time
from functools import partial

from async_rl.actor.outbox import Outbox
from async_rl.actor.remote import Remote
from async_rl.actor.service import Service
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import (
    Acquire,
    BufferReply,
    BufferRequest,
    Extend,
    Extended,
    FinishScore,
    Graded,
    LeaseId,
    LeaseReplies,
    LeaseReply,
    Leases,
    Leave,
    ScoreLease,
    WorkerStats,
)
from async_rl.protocol.control import ControlReply, ControlRequest
from async_rl.services.reward.pool import GraderPool
from async_rl.trajectory import Trajectory

AHEAD = 2  # groups leased for each process, so that none waits for the next lease
WAIT_S = 1.0  # of an Acquire, and for room: a stop is seen after at most so long
log = logging.getLogger(__name__)


class RewardService(Service):
    kind = "reward"
    requests, replies = ControlRequest, ControlReply

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._capacity = AHEAD * config.reward.processes * config.batch.group_size  # trajectories
        self._held: dict[LeaseId, tuple[ScoreLease, asyncio.Task[None]]] = {}
        self._room = asyncio.Event()
        self._ended = False
        self._results: Outbox[Graded, LeaseReply]
        self._finished = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._started = time.monotonic()

    async def work(self) -> None:
        # the pool comes first: a grader that cannot be built ends the service before it takes a lease
        async with (
            GraderPool(self.config.reward) as pool,
            self.remote("buffer", BufferRequest, BufferReply) as buffer,
            asyncio.TaskGroup() as tasks,
        ):
            self._results = Outbox(partial(self._finish, buffer))
            beat = tasks.create_task(self._keep_leases(buffer), name=f"{self.name} leases")
            async with asyncio.TaskGroup() as gradings:
                while not self._ended and not self.stopping.is_set():
                    free = self._capacity - sum(len(lease.trajectories) for lease, _ in self._held.values())
                    if free < self.config.batch.group_size:  # a group is never split
                        await self._wait_for_room()
                        continue
                    acquire = Acquire(self.name, self.incarnation, "score", free, -1, WAIT_S)
                    granted: Leases = await buffer.ask(acquire, wait_s=WAIT_S)
                    for lease in granted.score:
                        self._hold(lease, gradings, pool)
                    if granted.ended:
                        self._end()
                # after a stop, what is held is graded to its end
            beat.cancel()
            if not self._ended:
                with contextlib.suppress(TimeoutError, AsyncRLError):  # a buffer that is gone forgets it by itself
                    async with asyncio.timeout(self.config.services.stop_s / 2):
                        await buffer.ask(Leave(self.name, self.incarnation))

    async def _keep_leases(self, buffer: Remote) -> None:
        """Say each heartbeat, thrice in a lease at least, what is held; drop what is no longer ours."""
        every_s = min(self.config.services.heartbeat_s, self.config.services.lease_s / 3)
        while True:
            held = [
                (lease.id, min(trajectory.oldest_version for _, trajectory in lease.trajectories))
                for lease, _ in self._held.values()
            ]
            reply: Extended = await buffer.ask(Extend(self.name, self.incarnation, held, self._stats()))
            for lease_id, reason in reply.revoked:
                self._drop(lease_id, reason)
            if reply.ended:
                self._end()
            await asyncio.sleep(every_s)

    async def _grade(self, lease: ScoreLease, pool: GraderPool) -> None:
        async with asyncio.TaskGroup() as members:
            for member, trajectory in lease.trajectories:
                members.create_task(self._grade_member(lease, member, trajectory, pool))

    async def _grade_member(self, lease: ScoreLease, member: int, trajectory: Trajectory, pool: GraderPool) -> None:
        score = await pool.grade(lease.task, trajectory)
        if score.status == "failed":
            log.warning("%s: group %d member %d: %s", self.name, lease.id.group, member, score.detail)
        reply = await self._results.hand_in(Graded(lease.id, member, score))
        self._finished += 1
        if reply.outcome == "revoked":
            self._drop(lease.id, reply.reason)

    async def _finish(self, buffer: Remote, results: list[Graded]) -> list[LeaseReply]:
        answer: LeaseReplies = await buffer.ask(FinishScore(self.name, self.incarnation, results))
        return answer.replies

    def _hold(self, lease: ScoreLease, gradings: asyncio.TaskGroup, pool: GraderPool) -> None:
        if lease.id in self._held:
            return
        if not self._held:
            self._busy_since = time.monotonic()
        grading = gradings.create_task(self._grade(lease, pool), name=f"{self.name} {lease.id}")
        self._held[lease.id] = (lease, grading)
        grading.add_done_callback(lambda _: self._release(lease.id))  # also where it is cancelled unstarted

    def _release(self, lease_id: LeaseId) -> None:
        del self._held[lease_id]
        if not self._held:
            self._busy_s += time.monotonic() - self._busy_since
        self._room.set()

    def _drop(self, lease_id: LeaseId, reason: str) -> None:
        if lease_id in self._held:
            log.info("%s: group %d revoked: %s", self.name, lease_id.group, reason)
            self._held[lease_id][1].cancel()

    def _end(self) -> None:
        """The run is over: nobody asks for what is held."""
        self._ended = True
        for _, grading in self._held.values():
            grading.cancel()
        self._room.set()

    async def _wait_for_room(self) -> None:
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._room.wait()

    def _stats(self) -> WorkerStats:
        now = time.monotonic()
        busy_s = self._busy_s + (now - self._busy_since if self._held else 0.0)
        return WorkerStats(up_s=now - self._started, busy_s=busy_s, finished=self._finished)

    def detail(self) -> dict[str, float | int | str]:
        return {"held": len(self._held), "finished": self._finished}
