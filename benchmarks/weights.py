"""How fast new weights reach a rollout, against what the machine itself can do.

    python benchmarks/weights.py [--sections shm,collective,disk,delta] [--rounds 7] [--quick]

A model of about 500 MB in bfloat16 (Llama's shapes, random) is published again and again. Trainer, relay and rollout
are processes of their own; the relay is `async-rl serve weight-sync`. Figures are medians over rounds, in GB/s (10^9
bytes of weights) or seconds; what is compared takes turns, since the machine's pace changes, and ratios are of rounds.

shm          `transport`: the trainer's copy into the slot, mapped and reused, checksums included. Against `memcpy`: the
             C library's, of the same tensors, by one thread, into a mapped file of that size.
collective   `transport`: from the order to the last byte sent, checksums included. Against `broadcast`: gloo alone,
             between the trainer and another process, in buckets of 32 MiB.
disk         `transport`: the trainer's file, made durable.
delta        a collective; of each tensor a block of 4 KiB or two change.

`copy`: memcpy by as many threads as we use. `checksum`, `checksums`: xxh3 of all bytes by one thread, and by those.
`held_s`: how long the trainer stands still, until the version is visible; `relay_s`: of it what comes before the order
and after the last byte. `paused_s`: of a rollout, to fetch, verify and load the version into a live model.
The last line printed is one JSON object.
"""

import argparse
import asyncio
import ctypes
import datetime
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from async_rl.actor.remote import Remote
from async_rl.actor.service import run_id
from async_rl.config import Config, load
from async_rl.protocol.control import Stop
from async_rl.protocol.weight_sync import Fence, WeightSyncReply, WeightSyncRequest
from async_rl.rundir import RunDir
from async_rl.services.rollout.live_weights import LiveWeights
from async_rl.weights.carry import Bench, carry_out
from async_rl.weights.links import dist
from async_rl.weights.manifest import each
from async_rl.weights.order import Order, Outcome
from async_rl.weights.reader import Subscriber
from async_rl.weights.relays import folder_of
from async_rl.weights.source import checksum
from async_rl.weights.writer import Publisher

BUCKET = 32 * 2**20
GOAL = 0.9
RUN = """
name = "bench"
runs = "{folder}"
max_steps = 1
[model]
path = "none"
[data]
train = [{{ kind = "jsonl", path = "none" }}]
[rollout]
engine = {{ kind = "fake" }}
[weight_sync]
transport = "{transport}"
full_every = {full_every}
"""


class Llama(torch.nn.Module):
    """The tensors of a Llama, without what would run it."""

    def __init__(self, layers: int, hidden: int = 1024, inner: int = 2816, vocabulary: int = 32000) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrices = {"q": (hidden, hidden), "k": (hidden, hidden), "v": (hidden, hidden), "o": (hidden, hidden)}
        matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.embed = self._weight(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict(
                {name: self._weight(*shape) for name, shape in matrices.items()} | {"norm": self._weight(hidden)}
            )
            for _ in range(layers)
        )
        self.head = self._weight(vocabulary, hidden)

    @staticmethod
    def _weight(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16), requires_grad=False)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())


# --- the processes -------------------------------------------------------------------------------------


def remote(config: Config, sender: str) -> Remote:
    run, times = RunDir.of(config), config.services
    return Remote(
        "weight_sync",
        lambda: run.address("weight_sync"),
        WeightSyncRequest,
        WeightSyncReply,
        sender=sender,
        connect_s=times.connect_s,
        ask_s=times.ask_s,
        heartbeat_s=times.heartbeat_s,
        run=run_id(run),
    )


async def commands() -> Any:
    """Lines of standard input."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line.split()


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


async def trainer(config: Config, layers: int) -> None:
    model, bench = Llama(layers), Bench()
    carried: deque[float] = deque(maxlen=1)

    async def everywhere(order: Order) -> list[Outcome]:
        began = time.perf_counter()
        outcome = await asyncio.to_thread(carry_out, order, 0, model, bench)
        carried.append(time.perf_counter() - began)
        return [outcome]

    async with remote(config, "trainer") as relay:
        await relay.ask(Fence(1))
        folder = folder_of(config, RunDir.of(config))
        publisher = Publisher({"weight_sync": relay}, config.weight_sync, epoch=1, everywhere=everywhere, folder=folder)
        bare = Bare(model, folder.parent)
        say(nbytes=model.nbytes)
        async for command in commands():
            match command:
                case ["publish", version]:
                    change(model, int(version))
                    began = time.perf_counter()
                    await publisher.publish(int(version), model)
                    held_s = time.perf_counter() - began
                    say(held_s=held_s, carried_s=carried[-1])
                case ["bare", what]:
                    say(seconds=await asyncio.to_thread(getattr(bare, what)))
                case ["broadcast", port]:
                    say(seconds=await asyncio.to_thread(bare.broadcast, 0, int(port)))
                case ["stop"]:
                    await relay.ask(Stop("done"))
                    return


def change(model: Llama, version: int) -> None:
    """Of each tensor a block of 4 KiB or two are other ones."""
    for parameter in model.parameters():
        flat = parameter.view(-1)
        flat[(version * 7919) % flat.numel() :: 2048 * 10_000] = float(version)


async def rollout(config: Config, layers: int) -> None:
    live = Llama(layers)
    weights = LiveWeights(live)
    async with remote(config, "rollout-0") as relay:
        subscriber, have = Subscriber(relay, "rollout-0", "one"), -1
        say(ready=True)
        async for _ in commands():
            began = time.perf_counter()
            received = await subscriber.fetch(have, 60.0)
            assert received is not None
            verified = time.perf_counter()
            await asyncio.to_thread(weights.load, received)
            assert await subscriber.release(received)
            ended = time.perf_counter()
            have = received.version
            say(paused_s=ended - began, verify_s=verified - began, load_s=ended - verified)


class Bare:
    """What the machine does without us."""

    def __init__(self, model: Llama, folder: Path) -> None:
        self._model = model
        self._parts = [p.view(-1).view(torch.uint8) for p in model.parameters()]
        name = Path("/dev/shm") / f"bench-weights-{os.getpid()}"
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        name.unlink()
        os.posix_fallocate(descriptor, 0, model.nbytes)
        self._map = torch.frombuffer(mmap.mmap(descriptor, model.nbytes), dtype=torch.uint8)
        self._group: Any = None

    def memcpy(self) -> float:
        return self._copied(lambda parts: [ctypes.memmove(*part) for part in parts])

    def copy(self) -> float:
        return self._copied(lambda parts: each(lambda part: ctypes.memmove(*part), parts))

    def _copied(self, work: Any) -> float:
        at, parts = self._map.data_ptr(), []
        for part in self._parts:
            parts.append((at, part.data_ptr(), part.numel()))
            at += part.numel()
        began = time.perf_counter()
        work(parts)
        return time.perf_counter() - began

    def checksum(self) -> float:
        began = time.perf_counter()
        checksum(self._map)
        return time.perf_counter() - began

    def checksums(self) -> float:
        began = time.perf_counter()
        each(checksum, self._map.split(BUCKET))
        return time.perf_counter() - began

    def broadcast(self, rank: int, port: int) -> float:
        wait = datetime.timedelta(seconds=30)
        if self._group is None:
            self._store = dist.TCPStore("127.0.0.1", port, None, False, wait, wait_for_workers=False)
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], wait
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("bare/", self._store), rank, 2, options)
        how = dist.BroadcastOptions()
        how.rootRank, how.timeout = 0, wait
        self._group.barrier().wait()
        began = time.perf_counter()
        for bucket in self._map.split(BUCKET):
            self._group.broadcast([bucket], how).wait()
        return time.perf_counter() - began


async def peer(config: Config, layers: int) -> None:
    """The other end of a bare broadcast."""
    bare = Bare(Llama(layers), Path(config.runs))
    say(ready=True)
    async for command in commands():
        say(seconds=await asyncio.to_thread(bare.broadcast, 1, int(command[1])))


# --- the measurement -----------------------------------------------------------------------------------


class Process:
    def __init__(self, *command: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark has ended; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, *words: object) -> dict[str, Any]:
        self.tell(*words)
        return self.hear()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(section: str, rounds: int, layers: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bench-weights-"))
    transport, full_every = ("collective", 10**6) if section == "delta" else (section, 1)
    toml = folder / "run.toml"
    toml.write_text(RUN.format(folder=folder, transport=transport, full_every=full_every))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    relay = Process("-m", "async_rl.cli.main", "serve", "weight-sync", str(toml))
    others = [Process(__file__, "--role", role, str(toml), "--layers", str(layers)) for role in ROLES]
    learner, reader, mirror = others
    found: dict[str, list[float]] = {}

    def note(**figures: float) -> None:
        for name, value in figures.items():
            found.setdefault(name, []).append(value)

    try:
        nbytes = learner.hear()["nbytes"]
        for process in (reader, mirror):
            process.hear()
        for version in range(rounds + 2):
            warm = version < 2  # slots are new files twice
            published = learner.ask("publish", version)
            loaded = reader.ask("update")
            bare = {what: learner.ask("bare", what)["seconds"] for what in ("memcpy", "copy", "checksum", "checksums")}
            mirror.tell("broadcast", store.port)
            bare["broadcast"] = learner.ask("broadcast", store.port)["seconds"]
            mirror.hear()
            if not warm:
                note(**published, **loaded, **{f"{what}_s": seconds for what, seconds in bare.items()})
        learner.tell("stop")
    finally:
        for process in (*others, relay):
            process.end()
        shutil.rmtree(folder, ignore_errors=True)
        for slot in Path("/dev/shm").glob("async-rl-*"):
            if not slot.stat().st_nlink:
                slot.unlink()
    seconds = {name: statistics.median(values) for name, values in found.items()}
    rates = {name.removesuffix("_s"): nbytes / 1e9 / value for name, value in seconds.items()}
    against = "memcpy" if section == "shm" else "broadcast"
    ratio = statistics.median(b / c for b, c in zip(found[f"{against}_s"], found["carried_s"], strict=True))
    return {
        "bytes": nbytes,
        "transport_gb_s": round(rates["carried"], 2),
        **{f"{what}_gb_s": round(rates[what], 2) for what in ("memcpy", "copy", "checksum", "checksums", "broadcast")},
        f"ratio_to_{against}": round(ratio, 2),
        "held_s": round(seconds["held_s"], 3),
        "relay_s": round(seconds["held_s"] - seconds["carried_s"], 3),
        "paused_s": round(seconds["paused_s"], 3),
        "verify_s": round(seconds["verify_s"], 3),
        "load_s": round(seconds["load_s"], 3),
    }


ROLES = {"trainer": trainer, "rollout": rollout, "peer": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="shm,collective,disk,delta")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, to see that it works")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("toml", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.role:
        asyncio.run(ROLES[given.role](load(given.toml, []), given.layers))
        return
    rounds, layers = (2, 1) if given.quick else (given.rounds, given.layers)
    sections = {name: measure(name, rounds, layers) for name in given.sections.split(",")}
    keys = list(dict.fromkeys(key for section in sections.values() for key in section))
    print(f"{'':22}" + "".join(f"{name:>12}" for name in sections))
    for key in keys:
        print(f"{key:22}" + "".join(f"{section.get(key, ''):>12}" for section in sections.values()))
    missed = [
        f"{name}: {section[f'ratio_to_{what}']} of {GOAL}"
        for name, what in (("shm", "memcpy"), ("collective", "broadcast"))
        if (section := sections.get(name)) and section[f"ratio_to_{what}"] < GOAL
    ]
    print(json.dumps({"benchmark": "weights", "quick": given.quick, **sections, "missed": missed}))


if __name__ == "__main__":
    main()
