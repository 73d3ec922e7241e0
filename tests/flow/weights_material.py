"""Relays, ranks of a trainer and readers as processes that are there in milliseconds and can be killed at any moment.

A nursery is a process that has imported everything; it forks what it is asked for. Ranks do what the test tells them
through a store that the test hosts; rank 0 leads.
"""

import asyncio
import contextlib
import datetime
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from async_rl.actor.service import run_service
from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import WeightSyncReply, WeightSyncRequest
from async_rl.rundir import RunDir
from async_rl.services.weight_sync.service import WeightSyncService
from async_rl.weights.carry import Bench, carry_out
from async_rl.weights.links import dist as links_dist
from async_rl.weights.order import Order, Outcome
from async_rl.weights.reader import Subscriber
from async_rl.weights.relays import folder_of, relay_names
from async_rl.weights.writer import Publisher
from tests.flow.actor_material import Echo, settings, until

WAIT = datetime.timedelta(seconds=30)
RANK_S = datetime.timedelta(seconds=5)  # until every rank must have carried out its order


class Net(torch.nn.Module):
    """Large and small tensors, odd sizes, rows that 2 ranks share unevenly, a head that may be tied."""

    def __init__(self, seed, tied=True, width=64):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(301, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.one = torch.nn.Linear(width, 1)
        self.lm_head = torch.nn.Linear(width, 301, bias=False)
        self.register_buffer("scale", torch.tensor(float(seed)))
        if tied:
            self.lm_head.weight = self.embed.weight


def net(seed, tied=True, width=64, touched=None, **_):
    """touched: of one row of one layer alone the values are other ones."""
    model = Net(seed, tied, width)
    if touched is not None:
        with torch.no_grad():
            model.layers[1].weight[5] = float(touched)
    return model


def connect(config, sender, name):
    return Echo(config, sender).remote("weight_sync", WeightSyncRequest, WeightSyncReply, name=lambda: name)


# --- the nursery ---------------------------------------------------------------------------------------


class Nursery:
    """`with Nursery() as nursery: pid = nursery.fork(...)`; one does for many tests."""

    def __enter__(self):
        command = [sys.executable, "-m", "tests.flow.weights_material"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def fork(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class Nest:
    """`with Nest(nursery, runs, overrides) as nest`: the processes of one run, killed at the end."""

    def __init__(self, nursery, runs, *overrides):
        self._nursery, self._runs, self._overrides = nursery, str(runs), overrides
        self.config = settings(runs, overrides)
        self.run = RunDir.of(self.config)
        self.run.create()
        self.store = links_dist.TCPStore("127.0.0.1", 0, None, True, WAIT, wait_for_workers=False)
        self.pids = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.pids:
            kill(pid)

    def fork(self, **what):
        pid = self._nursery.fork(runs=self._runs, overrides=self._overrides, **what)
        self.pids.append(pid)
        return pid

    async def relay(self, name="weight_sync"):
        """A relay that has announced itself."""
        pid = self.fork(kind="relay", name=name)
        await until(lambda: self.run.pid(name) == pid)
        return pid

    def trainer(self, epoch, ranks):
        return Trainer(self, epoch, ranks)

    def log(self, pid):
        return (self.run.logs / f"{pid}.log").read_text()


class Trainer:
    """`ranks` processes of one trainer; `publish` tells them to, `wait` for what came of it."""

    def __init__(self, nest, epoch, ranks):
        self._store, self._epoch, self._told = nest.store, epoch, 0
        port = nest.store.port
        self.pids = [nest.fork(kind="rank", rank=k, ranks=ranks, epoch=epoch, port=port) for k in range(ranks)]

    def tell(self, version, **about):
        self._store.set(f"command/{self._epoch}/{self._told}", json.dumps({"version": version, **about}))
        self._told += 1
        return f"answer/{self._epoch}/{self._told - 1}"

    async def wait(self, key):
        """ "" or the error."""
        async with asyncio.timeout(30):
            while not self._store.check([key]):
                await asyncio.sleep(0.005)
        return self._store.get(key).decode().removeprefix("|")

    async def publish(self, version, **about):
        return await self.wait(self.tell(version, **about))

    def kill(self):
        for pid in self.pids:
            kill(pid)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# --- what a reader sees --------------------------------------------------------------------------------


async def fetched(config, name, have=-1, wait_s=10.0, worker="rollout-9"):
    """(version, {tensor name: copy}) from relay `name`; None where there is nothing newer."""
    async with connect(config, worker, name) as remote:
        subscriber = Subscriber(remote, worker, str(time.monotonic_ns()))
        received = await subscriber.fetch(have, wait_s)
        if received is None:
            return None
        tensors = {key: tensor.clone() for key, tensor in received.tensors()}
        tensors |= {alias: tensors[key] for alias, key in received.aliases.items()}
        assert await subscriber.release(received)
        return received.version, tensors


async def shows(nest, name, version, **about):
    """Whether relay `name` shows exactly `version`, and it is `net(**about)` bit for bit."""
    found, tensors = await fetched(nest.config, name)
    return found == version and equal(tensors, net(**about))


def equal(tensors, model, dtype=None):
    """Bit for bit, every name."""
    expected = model.state_dict()
    if dtype is not None:
        expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


# --- in the forked processes ---------------------------------------------------------------------------


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    importlib.import_module("torch._dynamo")  # what fully_shard imports when it is called first
    for line in sys.stdin:
        what = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        sys.stdin.close()
        status = 1
        try:
            config = settings(Path(what["runs"]), what["overrides"])
            log = os.open(RunDir.of(config).logs / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            status = live(config, what)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status or 0)


def live(config, what):
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    match what:
        case {"kind": "relay", "name": name}:
            return run_service(WeightSyncService(config, name))
        case {"kind": "reader", "name": name}:
            logging.basicConfig(level=logging.INFO)
            return asyncio.run(read_on(config, name, what["worker"]))
        case {"kind": "rank", "rank": rank, "ranks": ranks, "epoch": epoch, "port": port}:
            logging.basicConfig(level=logging.INFO)
            return take_part(config, rank, ranks, epoch, port)


async def read_on(config, name, worker):
    """A rollout: fetches every version, copies it, releases it; for ever."""
    async with connect(config, worker, name) as remote:
        subscriber, have = Subscriber(remote, worker, str(os.getpid())), -1
        while True:
            received = await subscriber.fetch(have, 5.0)
            if received is not None:
                tensors = [tensor.clone() for _, tensor in received.tensors()]
                assert tensors
                have = received.version if await subscriber.release(received) else -1


def take_part(config, rank, ranks, epoch, port):
    store = links_dist.TCPStore("127.0.0.1", port, None, False, WAIT, wait_for_workers=False)
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore(f"world/{epoch}/", store), rank=rank, world_size=ranks)
    return asyncio.run(lead(config, ranks, epoch, port, store)) if rank == 0 else follow(rank, epoch, store)


def shard(about, ranks):
    model = net(**about)
    return fully_shard(model) if ranks > 1 else model


def follow(rank, epoch, store):
    bench, number = Bench(), 0
    while True:
        about, _, order = store.get(f"order/{epoch}/{number}").partition(b"\n")
        order = msgspec.msgpack.decode(order, type=Order)
        outcome = carry_out(order, rank, shard(json.loads(about), 2), bench)
        store.set(f"outcome/{epoch}/{number}/{rank}", msgspec.msgpack.encode(outcome))
        number += 1


async def lead(config, ranks, epoch, port, commands):
    store = links_dist.TCPStore("127.0.0.1", port, None, False, RANK_S, wait_for_workers=False)
    bench, told, number, about, model = Bench(), 0, 0, {}, None

    def everywhere(order):
        nonlocal number
        store.set(f"order/{epoch}/{number}", json.dumps(about).encode() + b"\n" + msgspec.msgpack.encode(order))
        outcomes = [carry_out(order, 0, model, bench)]
        try:
            for rank in range(1, ranks):
                said = store.get(f"outcome/{epoch}/{number}/{rank}")
                outcomes.append(msgspec.msgpack.decode(said, type=Outcome))
        except RuntimeError:
            raise PublicationError(f"rank {rank} has not carried out its order") from None
        number += 1
        return outcomes

    async with contextlib.AsyncExitStack() as entered:
        relays = {
            name: await entered.enter_async_context(connect(config, "trainer", name)) for name in relay_names(config)
        }
        publisher = Publisher(
            relays,
            config.weight_sync,
            epoch=epoch,
            ranks=ranks,
            everywhere=lambda order: asyncio.to_thread(everywhere, order),
            folder=folder_of(config, RunDir.of(config)),
        )
        announcing = asyncio.create_task(publisher.announce_forever())
        while not announcing.done():
            about = json.loads(await asyncio.to_thread(commands.get, f"command/{epoch}/{told}"))
            publisher._dtype = about.get("dtype")
            model = shard(about, ranks)
            error = ""
            try:
                await publisher.publish(about["version"], model)
            except PublicationError as failed:
                error = str(failed)
            commands.set(f"answer/{epoch}/{told}", "|" + error)
            told += 1
        announcing.result()


if __name__ == "__main__":
    main()
