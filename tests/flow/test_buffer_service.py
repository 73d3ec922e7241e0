"""The buffer over real sockets, with scripted workers and a scripted trainer: long polls, idempotence, late
and restarted workers, malformed frames, the ways a run ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq
import zmq.asyncio

from async_rl.actor import wire
from async_rl.actor.remote import Remote
from async_rl.buffers.journal.memory import MemoryJournal
from async_rl.buffers.service import BufferService
from async_rl.config.schema import (
    Batch,
    Config,
    Data,
    Evaluation,
    JsonLines,
    Model,
    Rollout,
    Services,
    Staleness,
)
from async_rl.errors import AsyncRLError, PeerRefused
from async_rl.protocol import SCHEMA
from async_rl.protocol.buffer import (
    Acquire,
    Begin,
    BufferReply,
    BufferRequest,
    Close,
    DataEnded,
    Draw,
    Drawn,
    Evaluate,
    EvaluationReport,
    Extend,
    Extended,
    Fail,
    FinishGenerate,
    FinishScore,
    FinishStep,
    GenerateLease,
    GetBuffer,
    GetEvaluation,
    Graded,
    LeaseReplies,
    LeaseReply,
    Leases,
    NotYet,
    Sampled,
    ScoreLease,
    Started,
    StepFinished,
    Withdraw,
    WorkerStats,
)
from async_rl.protocol.control import Done, GetStatus, Stop
from async_rl.trajectory import Score, Task, Trajectory

SIZE = 2
TOKENS = 5000  # of a trajectory: two of its arrays travel as frames of their own, one in the body


class Stream:
    """A stream of `length` tasks."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def task(self, position: int) -> Task:
        return Task(index=position, source="numbers", prompt=f"{position}?", answer=str(position))


def configure(folder: Path, *, lease_s: float = 5.0, steps: int = 4, **tables: Any) -> Config:
    return Config(
        name="flow",
        runs=str(folder),
        model=Model(path="none"),
        data=Data(train=[JsonLines(path="none.jsonl")]),
        max_steps=steps,
        batch=Batch(groups=2, group_size=SIZE, min_valid=1),
        rollout=Rollout(max_in_flight=64),
        services=Services(heartbeat_s=0.2, lease_s=lease_s, stop_s=3.0, max_failures=2),
        **tables,
    )


class Peer:
    """A scripted worker or trainer."""

    def __init__(self, remote: Remote, name: str, incarnation: str = "one") -> None:
        self.remote, self.name, self.incarnation = remote, name, incarnation

    async def ask(self, message: Any, wait_s: float = 0.0) -> Any:
        return await self.remote.ask(message, wait_s=wait_s)

    async def acquire(self, stage: Any, n: int = 64, version: int = 0, wait_s: float = 5.0) -> Leases:
        request = Acquire(self.name, self.incarnation, stage, n, version, wait_s)
        reply = await self.ask(request, wait_s)
        assert isinstance(reply, Leases)
        return reply

    async def extend(self, *leases: Any) -> Extended:
        reply = await self.ask(Extend(self.name, self.incarnation, list(leases), WorkerStats(tokens=3)))
        assert isinstance(reply, Extended)
        return reply

    async def finish(self, lease: GenerateLease, member: int, version: int) -> LeaseReply:
        made = Sampled(lease.id, member, sample(version))
        answer = await self.ask(FinishGenerate(self.name, self.incarnation, [made]))
        assert isinstance(answer, LeaseReplies)
        (reply,) = answer.replies
        return reply

    async def generate(self, leases: list[GenerateLease], version: int = 0) -> None:
        for lease in leases:
            await self.ask(Started(self.name, self.incarnation, lease.id, version))
            for member in lease.members:
                assert (await self.finish(lease, member, version)).outcome == "accepted"

    async def score(self, leases: list[ScoreLease]) -> None:
        for lease in leases:
            assert all(trajectory.tokens.shape == (TOKENS,) for _, trajectory in lease.trajectories)
            graded = [Graded(lease.id, member, Score(float(member))) for member, _ in lease.trajectories]
            answer = await self.ask(FinishScore(self.name, self.incarnation, graded))
            assert [reply.outcome for reply in answer.replies] == ["accepted"] * len(graded)


def sample(version: int) -> Trajectory:
    action = np.ones(TOKENS, dtype=bool)
    action[0] = False
    logprobs = np.where(action, -0.5, 0.0).astype(np.float32)
    tokens = np.arange(TOKENS, dtype=np.int32)
    return Trajectory(tokens, action, logprobs, [(version, TOKENS - 1)], stop="eos", text="text")


class Buffer:
    """A running buffer service; `peer(name)` connects somebody to it."""

    def __init__(self, service: BufferService, running: "asyncio.Task[None]") -> None:
        self.service, self.running = service, running
        self._stack = contextlib.AsyncExitStack()

    @property
    def address(self) -> str | None:
        return self.service.run.address("buffer")

    async def peer(self, name: str, incarnation: str = "one") -> Peer:
        remote = Remote(
            "buffer",
            lambda: self.address,
            BufferRequest,
            BufferReply,
            sender=name,
            connect_s=10.0,
            ask_s=10.0,
            heartbeat_s=0.5,
        )
        return Peer(await self._stack.enter_async_context(remote), name, incarnation)

    async def close(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def serving(
    config: Config, tasks: Stream | None = None, held_out: int = 0, journal: Any = None
) -> AsyncIterator[Buffer]:
    """A buffer to which a trainer of epoch 1 has said that it begins."""
    held = [Task(index=i, source=("odd", "even")[i % 2], prompt="?") for i in range(held_out)]
    service = BufferService(config, "buffer", tasks=tasks or Stream(), held_out=held, journal=journal)
    buffer = Buffer(service, asyncio.create_task(service.main()))
    try:
        await (await buffer.peer("trainer")).ask(Begin(1, 0))
        yield buffer
    finally:
        await buffer.close()
        buffer.running.cancel()
        await asyncio.gather(buffer.running, return_exceptions=True)


def play(scenario: Callable[[], Awaitable[None]], seconds: float = 40.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scenario()

    uvloop.run(limited())


async def work(buffer: Buffer, name: str, stage: Any, version: Callable[[], int]) -> int:
    """A worker that works until it is told that the run is over; how many leases it had."""
    peer, leases = await buffer.peer(name), 0
    while True:
        granted = await peer.acquire(stage, version=version(), wait_s=0.3)
        leases += len(granted.generate) + len(granted.score)
        if granted.ended:
            return leases
        for lease in granted.generate:
            await peer.generate([lease], lease.min_version if lease.exact_version is None else version())
        await peer.score(granted.score)


def test_what_is_withdrawn_is_answered_at_once_and_not_granted_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path, mode="sync")) as buffer:
            rollout, other = await buffer.peer("rollout-0"), await buffer.peer("rollout-1")
            trainer = await buffer.peer("trainer")
            first = await rollout.acquire("generate")
            assert len(first.generate) == 2
            asked = asyncio.create_task(rollout.acquire("generate", wait_s=60.0))
            too = asyncio.create_task(other.acquire("generate", wait_s=60.0))
            while len(buffer.service._workers["generate"]._places) < 2:
                await asyncio.sleep(0.01)
            assert await rollout.ask(Withdraw("rollout-0", "generate")) == Done()
            assert await asked == Leases() and not too.done()
            assert (
                await rollout.ask(Withdraw("rollout-0", "generate")) == Done()
            )  # nothing is asked for: nothing happens
            failed = Fail("rollout-0", "one", first.generate[0].id, None, "stops", fault=False)
            assert (await rollout.ask(failed)).outcome == "accepted"
            assert [lease.id.group for lease in (await too).generate] == [first.generate[0].id.group]
            assert await trainer.ask(Close("enough")) == Done()

    play(scenario)


def test_a_whole_run_with_workers_trainer_and_evaluations(tmp_path: Path) -> None:
    """12: at max_steps the last evaluation is still pending; the run ends cleanly, everybody is told."""

    async def scenario() -> None:
        config = configure(tmp_path, evaluation=Evaluation(samples=2))
        async with serving(config, held_out=3) as buffer:
            trainer = await buffer.peer("trainer")
            crew = [
                asyncio.create_task(work(buffer, f"{kind}-{i}", stage, lambda: buffer.service.version))
                for kind, stage in (("rollout", "generate"), ("reward", "score"))
                for i in range(2)
            ]
            for step in range(config.max_steps):
                drawn = await trainer.ask(Draw(step, 1, 10.0), 10.0)
                assert isinstance(drawn, Drawn) and len(drawn.groups) == 2 and drawn.groups[0].bound == 2
                assert [len(group.members) for group in drawn.groups] == [SIZE, SIZE]
                assert drawn.groups[0].task.prompt == f"{drawn.groups[0].task.index}?"
                again = await trainer.ask(Draw(step, 1, 10.0), 10.0)
                assert [group.group for group in again.groups] == [group.group for group in drawn.groups]
                assert await trainer.ask(FinishStep(step, 1)) == StepFinished(step + 1)
            assert isinstance(await trainer.ask(Draw(config.max_steps, 1, 10.0), 10.0), DataEnded)
            assert await trainer.ask(Evaluate(config.max_steps)) == Done()
            done = await trainer.ask(GetEvaluation(config.max_steps, 10.0), 10.0)
            assert isinstance(done, EvaluationReport)
            assert (done.samples, done.voting, done.restarted, done.mean_reward) == (6, 6, 0, 0.5)
            assert {name: score.tasks for name, score in done.sources.items()} == {"odd": 2, "even": 1}
            assert await trainer.ask(Close("max_steps")) == Done()
            report = await trainer.ask(GetBuffer())
            assert report.conserved and report.ended and report.trained == 8 and report.held == 0
            assert await trainer.ask(GetEvaluation(config.max_steps, 1.0), 1.0) == done
            assert sum(await asyncio.gather(*crew)) >= 2 * (8 + 3)
            await buffer.running
        assert buffer.address is None

    play(scenario)


def test_an_acquire_sleeps_until_there_is_work_and_a_draw_until_there_is_a_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = configure(tmp_path, mode="sync")
        async with serving(config) as buffer:
            trainer, rollout = await buffer.peer("trainer"), await buffer.peer("rollout-0")
            grader = await buffer.peer("reward-0")
            draw = asyncio.create_task(trainer.ask(Draw(0, 1, 20.0), 20.0))
            scores = asyncio.create_task(grader.acquire("score", wait_s=20.0))
            granted = await rollout.acquire("generate")
            assert len(granted.generate) == 2 and not draw.done() and not scores.done()
            assert granted.generate[0].task == Stream().task(0)
            early = asyncio.create_task(rollout.acquire("generate", version=1, wait_s=20.0))
            await rollout.generate(granted.generate)
            await grader.score((await scores).score)
            while not draw.done():
                await grader.score((await grader.acquire("score", wait_s=0.2)).score)
            assert isinstance(await draw, Drawn) and not early.done()
            await trainer.ask(FinishStep(0, 1))
            assert [lease.min_version for lease in (await early).generate] == [1, 1]

    play(scenario)


def test_a_draw_that_gets_nothing_says_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path)) as buffer:
            trainer, rollout = await buffer.peer("trainer"), await buffer.peer("rollout-0")
            await rollout.acquire("generate", n=SIZE)
            reply = await trainer.ask(Draw(0, 1, 0.1), 0.1)
            assert isinstance(reply, NotYet)
            assert "0 of 2 groups are ready" in reply.reason
            assert "group 0 (generate, attempt 0) held by rollout-0" in reply.reason
            assert "services.lease_s = 5" in reply.reason and "trainer.draw_wait_s" in reply.reason

    play(scenario)


def test_a_repeated_finish_gets_its_first_answer_and_a_late_worker_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path, lease_s=0.5)) as buffer:
            rollout, other = await buffer.peer("rollout-0"), await buffer.peer("rollout-1")
            (lease,) = (await rollout.acquire("generate", n=SIZE)).generate
            assert [(await rollout.finish(lease, 0, 0)).outcome for _ in range(2)] == ["accepted", "repeat"]
            while not (taken := (await other.acquire("generate", n=1, wait_s=0.3)).generate):
                pass  # until the silent holder's lease has lapsed
            assert taken[0].members == [1] and taken[0].id.attempt == 1
            late = await rollout.finish(lease, 1, 0)
            assert late.outcome == "revoked" and "handed out again" in late.reason
            assert [id for id, _ in (await rollout.extend((lease.id, 0))).revoked] == [lease.id]
            assert (await rollout.finish(lease, 0, 0)).outcome == "repeat"
            assert (await other.ask(GetBuffer())).lapsed >= 1

    play(scenario)


def test_a_worker_that_is_started_anew_gets_its_work_again_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path, lease_s=600.0)) as buffer:
            old = await buffer.peer("rollout-0")
            (lease,) = (await old.acquire("generate", n=SIZE)).generate
            await old.extend((lease.id, 0))
            anew = await buffer.peer("rollout-0", "two")
            (again,) = (await anew.acquire("generate", n=SIZE)).generate
            assert (again.id.group, again.id.attempt) == (lease.id.group, 1)
            await anew.extend((again.id, 0))
            assert (await old.finish(lease, 0, 0)).outcome == "revoked"
            with pytest.raises(PeerRefused, match="incarnation one was replaced by two"):
                await old.acquire("generate")
            report = await anew.ask(GetBuffer())
            assert report.workers["rollout-0"].tokens == 6  # of both incarnations

    play(scenario)


def test_malformed_frames_are_counted_and_refused_and_harm_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path)) as buffer:
            rollout = await buffer.peer("rollout-0")
            await rollout.acquire("generate", n=SIZE)
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(str(buffer.address))
            hello = wire.encode_envelope(wire.Hello(SCHEMA, "buffer", "stranger", ""))
            request = wire.encode_envelope(wire.Request(1, True))
            await socket.send_multipart([hello])
            assert isinstance(wire.decode_envelope((await socket.recv_multipart())[0]), wire.Welcome)
            for frames in ([b"\xff\x00"], [request, b"garbage"], [request, b"\x81\xa4type\xa4Nope"]):
                await socket.send_multipart(frames)
                assert isinstance(wire.decode_envelope((await socket.recv_multipart())[0]), wire.Fault)
            context.destroy(linger=0)
            status = await rollout.ask(GetStatus())
            assert status.refused_frames == 3 and status.resident_bytes > 2**20
            assert status.detail["held"] == 1 and status.detail["journal_bytes"] > 0
            assert len((await rollout.acquire("generate", n=SIZE)).generate) == 1

    play(scenario)


def test_failures_in_a_row_end_the_service_and_the_trainers_draw(tmp_path: Path, caplog: Any) -> None:
    """8: the error reaches the trainer that waits, and ends the buffer; its log has the table of groups."""

    async def scenario() -> None:
        async with serving(configure(tmp_path)) as buffer:
            trainer, rollout = await buffer.peer("trainer"), await buffer.peer("rollout-0")
            draw = asyncio.create_task(trainer.ask(Draw(0, 1, 20.0), 20.0))
            while not (granted := await rollout.acquire("generate", n=SIZE)).ended:
                for lease in granted.generate:
                    await rollout.ask(Fail("rollout-0", "one", lease.id, None, "no such kernel"))
            with pytest.raises(PeerRefused, match="2 groups failed in a row"):
                await draw
            with pytest.raises(BaseExceptionGroup) as ended:
                await buffer.running
            assert ended.value.subgroup(AsyncRLError) is not None
            assert "no such kernel" in str(ended.value.exceptions)
        assert "admitted 2 = trained 0 + dropped 0 + failed 2 (attempts 2)" in caplog.text

    play(scenario)


def test_an_older_trainer_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path)) as buffer:
            trainer = await buffer.peer("trainer")
            await trainer.ask(Draw(0, 3, 0.0))
            with pytest.raises(PeerRefused, match="trainer epoch 2 is older than 3"):
                await trainer.ask(FinishStep(0, 2))

    play(scenario)


def test_an_answer_waits_until_its_events_are_durable(tmp_path: Path) -> None:
    class SlowJournal(MemoryJournal):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[Any] = []

        async def append(self, happened: Any) -> None:
            await asyncio.sleep(0.05)
            self.written.extend(happened)

    async def scenario() -> None:
        journal = SlowJournal()
        async with serving(configure(tmp_path), journal=journal) as buffer:
            rollout = await buffer.peer("rollout-0")
            (lease,) = (await rollout.acquire("generate", n=SIZE)).generate
            assert [type(event).__name__ for event in journal.written] == ["EpochRaised", "Admitted", "Leased"]
            await rollout.finish(lease, 0, 0)
            assert type(journal.written[-1]).__name__ == "Generated"

    play(scenario)


def test_an_ordered_stop_ends_the_service_and_its_run_can_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path, mode="sync")) as buffer:
            rollout, trainer = await buffer.peer("rollout-0"), await buffer.peer("trainer")
            await rollout.acquire("generate")
            waiting = asyncio.create_task(rollout.acquire("generate", wait_s=30.0))
            draw = asyncio.create_task(trainer.ask(Draw(0, 1, 30.0), 30.0))
            await asyncio.sleep(0.1)
            assert await trainer.ask(Stop("enough")) == Done()
            assert not (await waiting).ended
            assert isinstance(await draw, NotYet)
            await buffer.running
        async with serving(configure(tmp_path, mode="sync")) as buffer:
            rollout = await buffer.peer("rollout-0", "two")
            assert [lease.id.group for lease in (await rollout.acquire("generate")).generate] == [0, 1]

    play(scenario, 15.0)


def test_after_close_workers_that_never_come_back_hold_up_the_end_only_for_so_long(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(configure(tmp_path, lease_s=600.0)) as buffer:
            rollout, trainer = await buffer.peer("rollout-0"), await buffer.peer("trainer")
            await rollout.acquire("generate")
            await trainer.ask(Close("done"))
            await buffer.running  # within services.stop_s

    play(scenario, 15.0)


def test_a_draw_is_reused_over_the_wire(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = configure(tmp_path, mode="off-policy", staleness=Staleness(max=3, reuse=2), steps=4)
        async with serving(config) as buffer:
            trainer = await buffer.peer("trainer")
            crew = [
                asyncio.create_task(work(buffer, "rollout-0", "generate", lambda: buffer.service.version)),
                asyncio.create_task(work(buffer, "reward-0", "score", lambda: -1)),
            ]
            seen: list[tuple[int, list[int]]] = []
            for step in range(4):
                drawn = await trainer.ask(Draw(step, 1, 10.0), 10.0)
                seen.append((drawn.sequence, [group.group for group in drawn.groups]))
                await trainer.ask(FinishStep(step, 1))
            assert [sequence for sequence, _ in seen] == [0, 1, 0, 1]
            assert seen[0][1] == seen[1][1] != seen[2][1] == seen[3][1]
            await trainer.ask(Close("done"))
            await asyncio.gather(*crew)

    play(scenario)
