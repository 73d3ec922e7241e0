"""Our buffer, in a process of its own: what goes in by a producer's process comes out in a consumer's."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from buffer_turns import Cast, Turns, each

from async_rl.actor.remote import Remote
from async_rl.actor.service import run_id, run_service
from async_rl.config.schema import Batch, Config, Data, Journal, JsonLines, Model, Rollout, Services, Staleness
from async_rl.protocol import buffer as messages
from async_rl.rundir import RunDir
from async_rl.trajectory import Score, Task, Trajectory

STEP = 128  # samples of a draw
TOKENS = 2275  # 20.5 KB of arrays


def trajectory(tokens: int = TOKENS, version: int = 0) -> Trajectory:
    """Ids, the mask of sampled tokens, log-probabilities."""
    action = np.ones(tokens, dtype=bool)
    action[0] = False
    ids = np.random.default_rng(0).integers(0, 150_000, tokens, dtype=np.int32)
    logprobs = np.where(action, -0.5, 0.0).astype(np.float32)
    return Trajectory(ids, action, logprobs, [(version, tokens - 1)], stop="eos", text="")


def at(sample: Trajectory, version: int) -> Trajectory:
    return msgspec.structs.replace(sample, versions=[(version, int(sample.action.sum()))])


def configure(folder: Path, *, groups: int, size: int, held: int, journal: Journal) -> Config:
    """groups: of a step; held: groups that may be held at once."""
    return Config(
        name="bench",
        runs=str(folder),
        model=Model(path="none"),
        data=Data(train=[JsonLines(path="none")]),
        max_steps=10**9,
        batch=Batch(groups=groups, group_size=size, min_valid=1),
        staleness=Staleness(max=max(1, held // groups), on_exceed="drop"),
        rollout=Rollout(max_in_flight=10**6),
        services=Services(heartbeat_s=1.0, stop_s=5.0),
        journal=journal,
    )


class Stream:
    """Tasks without end."""

    length = None

    def task(self, position: int) -> Task:
        return Task(position, "bench", prompt=f"{position}")


def peer(config: Config, name: str) -> Remote:
    """A connection to the buffer of the run."""
    run, times = RunDir.of(config), config.services
    return Remote(
        "buffer",
        lambda: run.address("buffer"),
        messages.BufferRequest,
        messages.BufferReply,
        sender=name,
        connect_s=times.connect_s,
        ask_s=times.ask_s,
        heartbeat_s=times.heartbeat_s,
        run=run_id(run),
    )


class Buffer:
    """The process; its trainer has begun."""

    def __init__(self, config: Config) -> None:
        self.config, self.run = config, RunDir.of(config)

    def __enter__(self) -> "Buffer":
        shutil.rmtree(self.run.path, ignore_errors=True)
        self.run.create()
        settings = self.run.path / "config.json"
        settings.write_bytes(msgspec.json.encode(self.config))
        with (self.run.logs / "buffer.log").open("wb") as log:
            command = [sys.executable, __file__, str(settings)]
            self._process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            uvloop.run(self._begin())
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _begin(self) -> None:
        while self.run.address("buffer") is None:
            if self._process.poll() is not None:
                raise ChildProcessError("the buffer ended: " + (self.run.logs / "buffer.log").read_text()[-2000:])
            await asyncio.sleep(0.02)
        async with peer(self.config, "trainer") as trainer:
            await trainer.ask(messages.Begin(1, 0))

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def cpu_s(self) -> float:
        """Of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the measurement ---------------------------------------------------------------------------------


def through(folder: Path, samples: int, per_call: int, under_way: int, journal: Journal) -> dict[str, float]:
    """Seconds of each part, and CPU seconds of the buffer's process during `put`, as "buffer_cpu"."""
    groups = samples // per_call
    config = configure(folder, groups=STEP // per_call, size=per_call, held=groups, journal=journal)
    with (
        Buffer(config) as buffer,
        Cast(producer=(produce, config, groups, under_way), consumer=(consume, config, samples)) as cast,
    ):
        lease, before = cast.turn("producer", "lease"), buffer.cpu_s
        put, cpu = cast.turn("producer", "put"), buffer.cpu_s - before
        score, get = cast.turn("producer", "score"), cast.turn("consumer", "get")
    return {"lease": lease, "put": put, "score": score, "get": get, "buffer_cpu": cpu}


async def produce(turns: Turns, config: Config, groups: int, under_way: int) -> None:
    sample, size = trajectory(), config.batch.group_size
    async with peer(config, "rollout-0") as rollout, peer(config, "reward-0") as reward:

        async def finish(held: messages.GenerateLease) -> None:
            results = [messages.Sampled(held.id, member, sample) for member in held.members]
            await rollout.ask(messages.FinishGenerate("rollout-0", "i", results))

        async with turns.turn("lease"):
            leases = await lease(rollout, groups, size)
        async with turns.turn("put"):
            await each(leases, under_way, finish)
        async with turns.turn("score"):
            await grade(reward, groups, size)


async def consume(turns: Turns, config: Config, samples: int) -> None:
    async with peer(config, "trainer") as trainer, turns.turn("get"):
        for step in range(samples // STEP):
            drawn = await draw(trainer, step)
            if sum(len(group.members) for group in drawn.groups) != STEP:
                raise AssertionError(f"step {step} is not whole")
            await trainer.ask(messages.FinishStep(step, 1))


async def lease(rollout: Remote, groups: int, size: int, version: int = 0) -> list[messages.GenerateLease]:
    leases: list[messages.GenerateLease] = []
    while len(leases) < groups:
        ask = messages.Acquire("rollout-0", "i", "generate", (groups - len(leases)) * size, version, 5.0)
        leases += (await rollout.ask(ask, wait_s=5.0)).generate
    return leases


async def grade(reward: Remote, groups: int, size: int) -> None:
    """All that is generated gets its score, 128 samples a call."""
    done = 0
    while done < groups:
        granted = await reward.ask(messages.Acquire("reward-0", "i", "score", 128, -1, 5.0), wait_s=5.0)
        results = [
            messages.Graded(lease.id, m, Score(float(m % 2))) for lease in granted.score for m, _ in lease.trajectories
        ]
        if results:
            await reward.ask(messages.FinishScore("reward-0", "i", results))
        done += len(granted.score)


async def draw(trainer: Remote, step: int) -> messages.Drawn:
    while True:
        drawn = await trainer.ask(messages.Draw(step, 1, 10.0), wait_s=10.0)
        if isinstance(drawn, messages.Drawn):
            return drawn


# --- many workers, many groups -----------------------------------------------------------------------


def worked(folder: Path, count: int, groups: int, size: int = 4) -> dict[str, float]:
    """Groups a second that `count` workers, one grader and a trainer bring to their end, all of them connected
    before; and CPU microseconds of the buffer's process for each."""
    config = configure(folder, groups=64, size=size, held=2048, journal=Journal())
    with Buffer(config) as buffer:
        return uvloop.run(_worked(buffer, count, groups // 64))


async def _worked(buffer: Buffer, count: int, steps: int) -> dict[str, float]:
    size, sample = buffer.config.batch.group_size, trajectory(64)
    names = [f"rollout-{i}" for i in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        trainer, reward, *peers = [
            await stack.enter_async_context(peer(buffer.config, name)) for name in ("trainer", "reward-0", *names)
        ]
        for one in peers:
            await one.ask(messages.GetBuffer())

        async def work(name: str, one: Remote) -> None:
            while True:
                granted = await one.ask(messages.Acquire(name, "i", "generate", size, 10**6, 5.0), wait_s=5.0)
                for held in granted.generate:
                    results = [messages.Sampled(held.id, m, at(sample, held.min_version)) for m in held.members]
                    await one.ask(messages.FinishGenerate(name, "i", results))

        async def graded() -> None:
            while True:
                await grade(reward, 1, size)

        tasks = [asyncio.create_task(work(name, one)) for name, one in zip(names, peers, strict=True)]
        tasks.append(asyncio.create_task(graded()))
        loop, warm = asyncio.get_running_loop(), max(1, steps // 8)
        for step in range(warm + steps):
            if step == warm:
                began, cpu = loop.time(), buffer.cpu_s
            await draw(trainer, step)
            await trainer.ask(messages.FinishStep(step, 1))
        took, cpu = loop.time() - began, buffer.cpu_s - cpu
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"groups_per_s": steps * 64 / took, "buffer_cpu_us": cpu / (steps * 64) * 1e6}


def remembered(folder: Path, groups: int) -> tuple[list[float], float]:
    """MiB resident in the buffer's process after each tenth of `groups`, and of journal at the end; the journal
    keeps what its checkpoints need."""
    journal = Journal(keep="checkpoint", cache_bytes=8 * 2**20, segment_bytes=8 * 2**20)
    with Buffer(configure(folder, groups=100, size=1, held=400, journal=journal)) as buffer:
        resident = uvloop.run(_remembered(buffer, groups // 100))
        on_disk = sum(path.stat().st_size for path in buffer.run.journal.glob("*.log")) / 2**20
    return resident, on_disk


async def _remembered(buffer: Buffer, steps: int) -> list[float]:
    sample, resident = trajectory(256), []
    async with contextlib.AsyncExitStack() as stack:
        names = ("trainer", "rollout-0", "reward-0")
        trainer, rollout, reward = [await stack.enter_async_context(peer(buffer.config, name)) for name in names]
        for step in range(steps):
            results = [
                messages.Sampled(held.id, held.members[0], at(sample, held.min_version))
                for held in await lease(rollout, 100, 1, step)
            ]
            await rollout.ask(messages.FinishGenerate("rollout-0", "i", results))
            await grade(reward, 100, 1)
            await draw(trainer, step)
            await trainer.ask(messages.FinishStep(step, 1))
            if step % 10 == 0:
                await trainer.ask(messages.Checkpointed(step, 1))
            if (step + 1) % (steps // 10) == 0:
                resident.append(round(buffer.resident_mb, 1))
    return resident


def serve(settings: Path) -> int:
    """The buffer's process."""
    from async_rl.buffers.service import BufferService

    config = msgspec.json.decode(settings.read_bytes(), type=Config)
    return run_service(BufferService(config, "buffer", tasks=Stream(), held_out=[]))


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
