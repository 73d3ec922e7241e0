"""Graders in processes that can be killed, so that a grader that hangs costs a process and never a slot.

The time limit is kept from here, by SIGKILL to the process and everything it started. A hang or a death is
tried once more in a fresh process. Twice hung counts as the policy's doing: `timeout`, with a reward. A
process that dies is a fault: `failed`, without a vote.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from async_rl.actor.wire import Codec
from async_rl.config.schema import Reward
from async_rl.errors import UserError, WireError
from async_rl.services.reward import pipe
from async_rl.trajectory import Score, Task, Trajectory

ATTEMPTS = 2
BUILD_S = 120.0  # until a fresh process has imported the grader


class Hung(Exception):
    """The grader took longer than `reward.timeout_s`."""


class Died(Exception):
    """The process ended, or answered what is no answer."""


class GraderPool:
    """`async with GraderPool(config.reward) as pool: score = await pool.grade(task, trajectory)`.

    Entering builds the grader in a first process; UserError where that cannot be done.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._slots = [Slot(reward) for _ in range(reward.processes)]
        self._free: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()  # the last used has its process running

    async def __aenter__(self) -> "GraderPool":
        try:
            await self._slots[0].prepare()
        except Died as fault:
            raise UserError(f"reward.grader = {self._reward.grader}: {fault}") from None
        for slot in reversed(self._slots):
            self._free.put_nowait(slot)
        return self

    async def __aexit__(self, *_: object) -> None:
        for slot in self._slots:
            await slot.close()

    async def grade(self, task: Task, trajectory: Trajectory) -> Score:
        """The score; waits for a free process, then at most `ATTEMPTS` times `reward.timeout_s`."""
        slot = await self._free.get()
        try:
            faults: list[Exception] = []
            for _ in range(ATTEMPTS):
                try:
                    return await slot.grade(task, trajectory)
                except (Hung, Died) as fault:
                    faults.append(fault)
            return verdict(faults, self._reward)
        finally:
            self._free.put_nowait(slot)


def verdict(faults: Sequence[Exception], reward: Reward) -> Score:
    """The score of a trajectory that every attempt failed to grade."""
    if all(isinstance(fault, Hung) for fault in faults):
        return Score(reward=reward.timeout_reward, status="timeout", detail=str(faults[-1]))
    return Score(reward=None, status="failed", detail="; then ".join(map(str, faults)))


class Slot:
    """Room for one process at a time."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._worker: Worker | None = None

    async def prepare(self) -> None:
        """Have a process that is ready to grade."""
        if self._worker is None:
            self._worker = await Worker.start(self._reward)

    async def grade(self, task: Task, trajectory: Trajectory) -> Score:
        await self.prepare()
        try:
            async with asyncio.timeout(self._reward.timeout_s):
                answer = await self._ask(pipe.Grade(task, trajectory))
        except TimeoutError:
            await self.close()
            raise Hung(f"no verdict within reward.timeout_s = {self._reward.timeout_s:g}") from None
        except BaseException:  # cancelled too: an answer under way must not be taken for the next one's
            await self.close()
            raise
        return answer.score

    async def _ask(self, order: pipe.Grade) -> pipe.Graded:
        assert self._worker is not None
        answer = await self._worker.ask(order)
        if not isinstance(answer, pipe.Graded):
            raise Died(answer.reason if isinstance(answer, pipe.Gone) else f"answered {answer}")
        return answer

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()


class Worker:
    """A running process of services/reward/worker.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._orders, self._answers = Codec(pipe.Order), Codec(pipe.Answer)

    @classmethod
    async def start(cls, reward: Reward) -> "Worker":
        """A process with the grader built; UserError where it cannot be, Died where the process ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder of the user's never stands in for a library
            "-m",
            "async_rl.services.reward.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # its own group, which one signal reaches whole
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        worker, ready = cls(process), False
        try:
            async with asyncio.timeout(BUILD_S):
                answer = await worker.ask(pipe.Build(reward.grader))
            ready = isinstance(answer, pipe.Ready)
        except TimeoutError:
            raise Died(f"building the grader takes more than {BUILD_S:g} s") from None
        finally:
            if not ready:
                await worker.kill()
        match answer:
            case pipe.Ready():
                return worker
            case pipe.Unusable(reason=reason):
                raise UserError(reason)
            case _:
                raise Died(f"while it built the grader: {answer}")

    async def ask(self, order: pipe.Build | pipe.Grade) -> pipe.Answer:
        """The answer to `order`; Died where the process is gone."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None
        try:
            orders.write(pipe.pack(self._orders, order))
            await orders.drain()
            body = await answers.readexactly(pipe.length(await answers.readexactly(pipe.HEAD_BYTES)))
            answer: pipe.Answer = pipe.unpack(self._answers, body)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Died("the grading process is gone") from error
        except WireError as error:
            raise Died(f"the grading process wrote among its answers: {error}") from error
        return answer

    async def kill(self) -> None:
        """End the process and everything that it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
