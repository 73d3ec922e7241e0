"""A scripted buffer and a scripted relay over real sockets, and a rollout service between them."""

import asyncio
import contextlib
import time

import numpy as np

from async_rl.actor.mailbox import Mailbox
from async_rl.config import parse
from async_rl.protocol.buffer import (
    Acquire,
    BufferReply,
    BufferRequest,
    Extend,
    Extended,
    Fail,
    FinishGenerate,
    GenerateLease,
    LeaseId,
    LeaseReplies,
    LeaseReply,
    Leases,
    Leave,
    Sampled,
    Started,
    Withdraw,
)
from async_rl.protocol.control import Done
from async_rl.protocol.weight_sync import (
    Bucket,
    Fetch,
    Manifest,
    NoNewer,
    Release,
    Released,
    TensorEntry,
    Weights,
    WeightSyncReply,
    WeightSyncRequest,
)
from async_rl.rundir import RunDir
from async_rl.services.rollout.service import RolloutService
from async_rl.trajectory import Task
from async_rl.weights.draft import layout_of
from async_rl.weights.manifest import seal


def settings(runs, **tables):
    """A quick run: groups of 2, at most 8 trajectories in flight, the fake engine."""
    base = {
        "name": "ring",
        "runs": str(runs),
        "max_steps": 1,
        "model": {"path": "none"},
        "data": {"train": [{"kind": "jsonl", "path": "none"}]},
        "batch": {"groups": 2, "group_size": 2},
        "sampling": {"max_new_tokens": 40},
        "rollout": {
            "max_in_flight": 8,
            "engine": {"kind": "fake", "tokens_per_s": 400.0, "median_tokens": 20, "accuracy": 1.0},
        },
        "services": {"connect_s": 20.0, "ask_s": 20.0, "heartbeat_s": 0.2, "stop_s": 5.0, "lease_s": 0.3},
    }
    return parse(base | tables)


class Buffer:
    """Grants what is in `queue` where the worker's version allows it; writes down everything it is told."""

    def __init__(self, config):
        self.config = config
        self.queue: list[GenerateLease] = []
        self.granted: dict[int, int] = {}  # group -> version of the worker it went to
        self.acquired: list[Acquire] = []
        self.started: dict[int, int] = {}
        self.finished: dict[tuple[int, int], Sampled] = {}
        self.failed: list[Fail] = []
        self.progress: dict[int, list[int]] = {}  # group -> reported oldest versions
        self.stats = None
        self.revoke: dict[LeaseId, str] = {}
        self.refuse_start: set[int] = set()
        self.ended = False
        self.patient = False  # an Acquire is answered with leases, or when it is withdrawn
        self.withdrawn = 0
        self.left = False
        self._group = 0

    def offer(self, count=1, *, members=2, exact=None, greedy=False, prompt="question", answer="right"):
        for _ in range(count):
            task = Task(index=self._group, source="test", prompt=prompt, answer=answer)
            id_ = LeaseId(self._group, 0, "generate")
            sampling = self.config.sampling
            everyone = list(range(members))
            told = everyone if greedy is True else list(greedy or [])
            self.queue.append(GenerateLease(id_, task, everyone, sampling, told, exact or 0, exact))
            self._group += 1

    async def handle(self, request):
        match request:
            case Acquire(n=n, version=version, wait_s=wait_s):
                self.acquired.append(request)
                withdrawn, give_up = self.withdrawn, time.monotonic() + wait_s
                while withdrawn == self.withdrawn and (self.patient or time.monotonic() < give_up):
                    leases = self._grant(n, version)
                    if leases or self.ended:
                        return Leases(generate=leases, ended=self.ended)
                    await asyncio.sleep(0.01)
                return Leases()
            case Withdraw():
                self.withdrawn += 1
                return Done()
            case Leave():
                self.left = True
                return Done()
            case Started(lease=lease, version=version):
                if lease.group in self.refuse_start:
                    return LeaseReply("revoked", "too old")
                self.started[lease.group] = version
                return LeaseReply("accepted")
            case Extend(leases=leases, stats=stats):
                self.stats = stats
                for lease, oldest in leases:
                    self.progress.setdefault(lease.group, []).append(oldest)
                revoked = [(lease, self.revoke[lease]) for lease, _ in leases if lease in self.revoke]
                return Extended(revoked, self.ended)
            case FinishGenerate(results=results):
                for result in results:
                    assert result.trajectory.problems() is None
                    self.finished[result.lease.group, result.member] = result
                return LeaseReplies([LeaseReply("accepted")] * len(results))
            case Fail():
                self.failed.append(request)
                return LeaseReply("accepted")

    def _grant(self, n, version):
        leases = []
        for lease in list(self.queue):
            allowed = lease.exact_version in (None, version) and version >= lease.min_version
            if allowed and len(lease.members) <= n:
                n -= len(lease.members)
                self.queue.remove(lease)
                self.granted[lease.id.group] = version
                leases.append(lease)
        return leases

    def trajectory(self, group, member=0):
        return self.finished[group, member].trajectory

    def versions(self, group):
        return [version for version, _ in self.trajectory(group).versions]


class Relay:
    """Gives out the version last published; `take_back` the next so many readings."""

    def __init__(self, folder):
        self._folder = folder
        self._visible = None
        self._tickets = 0
        self.take_back = 0
        self.fetched: list[int] = []

    @property
    def version(self):
        return self._visible[0].version if self._visible else -1

    def publish(self, version, model=None):
        path = self._folder / f"slot-{version}"
        if model is None:
            path.write_bytes(data := bytes(64))
            layout = Manifest(version, 0, 64, [TensorEntry("w", "float32", [16], 0, 64)], [])
            manifest = Manifest(version, 0, 64, layout.tensors, [Bucket(0, 64, checksum_of(data))])
        else:
            layout, data = packed(model)
            path.write_bytes(data)
            manifest = seal(layout, data, version=version, epoch=0)
        self._visible = (manifest, str(path))

    async def handle(self, request):
        match request:
            case Fetch(have=have, wait_s=wait_s):
                for _ in range(round(wait_s / 0.01) + 1):
                    if self.version > have:
                        self._tickets += 1
                        self.fetched.append(self.version)
                        return Weights(*self._visible, self._tickets)
                    await asyncio.sleep(0.01)
                return NoNewer(self.version)
            case Release():
                self.take_back, valid = max(self.take_back - 1, 0), self.take_back == 0
                return Released(valid)


def checksum_of(data):
    import xxhash

    return xxhash.xxh3_64_intdigest(data)


def packed(model):
    """The layout of `model`, a module or names and tensors, and its bytes."""
    layout = layout_of(model, 2**20)
    data = bytearray(layout.nbytes)
    tensors = model if isinstance(model, dict) else model.state_dict()
    for entry in layout.tensors:
        raw = np.ascontiguousarray(tensors[entry.name].detach().numpy()).tobytes()
        data[entry.offset : entry.offset + entry.nbytes] = raw
    return layout, data


class Ring:
    def __init__(self, config, buffer, relay, service, task):
        self.config, self.buffer, self.relay, self.service, self.task = config, buffer, relay, service, task

    async def until(self, condition, limit_s=20.0):
        """Wait for `condition`, or raise what ended the service."""
        async with asyncio.timeout(limit_s):
            while not condition():
                if self.task.done():
                    self.task.result()
                    assert condition(), "the service ended first"
                await asyncio.sleep(0.005)

    async def end(self):
        """Let the run end, and the service with it."""
        self.buffer.ended = True
        async with asyncio.timeout(20):
            await self.task


@contextlib.asynccontextmanager
async def ring(config, tmp_path, published=0, model=None):
    """Buffer and relay that listen, a rollout service that runs; version `published` is out."""
    run = RunDir.of(config)
    run.create()
    buffer, relay = Buffer(config), Relay(tmp_path)
    if published is not None:
        relay.publish(published, model)
    async with (
        Mailbox("", "buffer", BufferRequest, BufferReply, buffer.handle) as buffer_box,
        Mailbox("", "weight_sync", WeightSyncRequest, WeightSyncReply, relay.handle) as relay_box,
    ):
        run.announce("buffer", buffer_box.address)
        run.announce("weight_sync", relay_box.address)
        serving = [asyncio.create_task(box.serve()) for box in (buffer_box, relay_box)]
        service = RolloutService(config, "rollout-0")
        task = asyncio.create_task(service.main())
        try:
            yield Ring(config, buffer, relay, service, task)
        finally:
            for running in (task, *serving):
                running.cancel()
            await asyncio.gather(task, *serving, return_exceptions=True)
