"""Services and connections for the tests of the actor layer and of weight sync.

Run as a script it is one of those services in a process of its own:

    python actor_material.py KIND RUNS_FOLDER key.sub=value ...
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from async_rl.actor.mailbox import Mailbox
from async_rl.actor.remote import Remote
from async_rl.actor.service import Service, run_service
from async_rl.config import parse
from async_rl.config.load import apply_override
from async_rl.errors import InvariantError, UserError, WorkRevoked
from async_rl.protocol.weight_sync import (
    Fetch,
    NoNewer,
    Release,
    Released,
    WeightSyncReply,
    WeightSyncRequest,
)
from async_rl.rundir import RunDir
from async_rl.weights.reader import Subscriber

BEAT_S = 0.1


def settings(runs, overrides=(), **services):
    """The configuration of a run without data, quick in all its deadlines."""
    table = {
        "name": "ring",
        "runs": str(runs),
        "max_steps": 1,
        "model": {"path": "none"},
        "data": {"train": [{"kind": "jsonl", "path": "none"}]},
        "rollout": {"engine": {"kind": "fake"}},
        "weight_sync": {"directory": str(runs), "publish_s": 20.0, "bucket_bytes": 65536},
        "services": {"connect_s": 20.0, "ask_s": 20.0, "heartbeat_s": BEAT_S, "stop_s": 1.0, **services},
    }
    for override in overrides:
        apply_override(table, override)
    return parse(table)


class Echo(Service):
    """Answers a Fetch after its `wait_s`; what a Release is answered with stands in its worker's name."""

    kind = "weight_sync"
    requests, replies = WeightSyncRequest, WeightSyncReply

    async def work(self):
        await self.stopping.wait()

    async def handle(self, request):
        return await echo(request)


class Fails(Echo):
    async def work(self):
        raise UserError("model.path = 'nowhere': no such folder")


class Breaks(Echo):
    async def work(self):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(30))
            tasks.create_task(self._break())

    async def _break(self):
        raise InvariantError("two and two\nare five")


class Returns(Echo):
    async def work(self):
        await asyncio.sleep(0.2)


class Dawdles(Echo):
    """Does not heed the ordered stop, only the cancellation after it."""

    async def work(self):
        await asyncio.sleep(600)


class Hangs(Echo):
    """Heeds no cancellation: a thread that the event loop waits for when it closes."""

    async def work(self):
        await asyncio.to_thread(time.sleep, 600)


async def echo(request):
    match request:
        case Fetch(wait_s=wait_s, have=have):
            await asyncio.sleep(wait_s)
            return NoNewer(have)
        case Release(worker="revoked"):
            raise WorkRevoked("this ticket is revoked")
        case Release(worker="defect"):
            raise ZeroDivisionError("a defect of the handler")
        case Release(worker="invariant"):
            raise InvariantError("a promise that does not hold")
        case Release():
            return Released(True)


def fetch(have=0, wait_s=0.0):
    return Fetch("rollout-0", "one", have, wait_s)


def remote(resolve, **changes):
    times = {"connect_s": 20.0, "ask_s": 20.0, "heartbeat_s": BEAT_S, **changes}
    service = times.pop("service", "weight_sync")
    return Remote(service, resolve, WeightSyncRequest, WeightSyncReply, sender="test", **times)


def mailbox(handle=echo, address="", **changes):
    return Mailbox(address, "weight_sync", WeightSyncRequest, WeightSyncReply, handle, **changes)


@contextlib.asynccontextmanager
async def serving(handle=echo, address="", **changes):
    """A mailbox that serves for as long as the block lasts."""
    async with mailbox(handle, address, **changes) as box:
        task = asyncio.create_task(box.serve())
        try:
            yield box
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def run(coroutine, limit_s=60):
    """Run to the end, on the loop that services use; a hang fails."""

    async def limited():
        async with asyncio.timeout(limit_s):
            return await coroutine

    return uvloop.run(limited())


async def until(condition, limit_s=20):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


class Process:
    """`with Process("echo", runs) as process`: a service of its own, killed at the end."""

    def __init__(self, kind, runs, *overrides):
        self.rundir = RunDir.of(settings(runs, overrides))
        self.rundir.create()
        self.log = self.rundir.logs / f"{kind}-{time.monotonic_ns()}.log"
        self.command = [sys.executable, __file__, kind, str(runs), *overrides]

    def __enter__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(self.command, stderr=log, env=environment)
        self.pid = self.popen.pid
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self.popen.kill()
        self.popen.wait()

    def lines(self):
        return self.log.read_text().splitlines()

    def announced(self):
        """Whether this very process has announced its address."""
        assert self.popen.poll() is None, self.lines()
        return self.rundir.pid("weight_sync") == self.pid


def build(kind, config):
    if kind == "relay":
        from async_rl.services.weight_sync.service import WeightSyncService

        return WeightSyncService(config, "weight_sync")
    services = {c.__name__.lower(): c for c in (Echo, Fails, Breaks, Returns, Dawdles, Hangs)}
    return services[kind](config, "weight_sync")


class Reader(Echo):
    """A rollout that fetches the weights and never gets done with reading them."""

    async def work(self):
        async with self.remote("weight_sync", WeightSyncRequest, WeightSyncReply) as relay:
            received = await Subscriber(relay, "rollout-0", self.incarnation).fetch(-1, 20.0)
            (self.run.path / "reading").write_text(str(received.version))
            await self.stopping.wait()


if __name__ == "__main__":
    kind, runs, *overrides = sys.argv[1:]
    config = settings(Path(runs), overrides)
    sys.exit(run_service(Reader(config, "rollout-0") if kind == "reader" else build(kind, config)))
