"""The ranks of a trainer as processes: the leading one, in the trainer's service or a replay, and those that follow.

    with Team(config, folder, logs) as team:
        result = team.do(Step(drawn))      # on every rank

A rank that is lost cannot be replaced under way, since each holds a part of the weights: the leading process ends at
once, with the status of RankLost, and the others with it. Whoever started it starts it anew, from the newest
checkpoint.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch.distributed

from async_rl.actor.process import PARENT
from async_rl.config.ranks import first_remote
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, DeadlineExceeded, PublicationError, RankLost
from async_rl.services.trainer.orders import CarryOut, Leave, Orders, ToDo
from async_rl.services.trainer.ranks import Ranks, exchange_failed, join
from async_rl.services.trainer.work import Work
from async_rl.weights.links import Hub
from async_rl.weights.order import Order, Outcome

dist: Any = torch.distributed  # whose stubs leave out what is used here
WATCH_S = 0.2
SAME_S = 5.0  # for the leading rank to find by itself what another one has failed of
LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)


class Told(msgspec.Struct, frozen=True):
    """What a rank that comes to the store finds there."""

    config: dict[str, Any]
    checkpoints: str  # folder


class Failed(msgspec.Struct, frozen=True):
    """The end that a rank came to by itself."""

    rank: int
    status: int
    reason: str


class Team:
    """checkpoints: the folder that they are written to. logs: of the ranks that are started here, as trainer-RANK.log.

    To be entered, used and closed in one thread, but for `carry_out`. DeadlineExceeded where a rank does not come."""

    def __init__(self, config: Config, checkpoints: Path, logs: Path) -> None:
        self._config, self._checkpoints, self._logs = config, checkpoints, logs
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._giving = threading.Lock()
        self._store: Any = None

    def __enter__(self) -> Self:
        settings = self._config.trainer
        try:
            ranks = join(settings, 0) if settings.ranks == 1 else self._gather()
        except BaseException:
            self.kill()
            raise
        self.work = Work(self._config, ranks, self._checkpoints)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def close(self) -> None:
        """The others leave in order; nothing after `kill`."""
        if self._over.is_set():
            return
        self._over.set()
        if self._store is not None:
            self.do(Leave())
        until = time.monotonic() + self._config.services.stop_s
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(until - time.monotonic(), 0))
        self.kill()
        if dist.is_initialized():
            dist.destroy_process_group()

    def kill(self) -> None:
        """Those of this host are gone at once; from any thread."""
        self._over.set()
        for child in self._children.values():
            child.kill()

    def do(self, order: ToDo) -> Any:
        """Have every rank do it; what this one found."""
        if self._store is None:
            return self.work.do(order)
        with _with_others():
            with self._giving:
                self._orders.give(order)
            return self.work.do(order)

    def carry_out(self, order: Order) -> list[Outcome]:
        """A publication's order, on every rank of several; in any thread. PublicationError where one does not tell of
        it within weight_sync.publish_s."""
        assert self._store is not None
        with _with_others(), self._giving:
            number = self._orders.give(CarryOut(order))
        publish_s = self._config.weight_sync.publish_s
        until = time.monotonic() + publish_s
        outcomes: list[Outcome] = [self.work.do(CarryOut(order))]
        for rank in range(1, self.work.ranks.size):
            key = answer(number, rank)
            while not self._store.check([key]):
                if time.monotonic() > until:
                    missing = DeadlineExceeded(f"the outcome of rank {rank}", publish_s, "weight_sync.publish_s")
                    raise PublicationError(f"version {order.version}: {missing}")
                time.sleep(0.001)
            outcomes.append(msgspec.json.decode(self._store.get(key), type=Outcome))
            self._store.delete_key(key)
        return outcomes

    # --- the others ----------------------------------------------------------------------------------

    def _gather(self) -> Ranks:
        """Start the ranks of this host, wait for all, and watch them from then on."""
        settings = self._config.trainer
        host, _, port = settings.rendezvous.rpartition(":")
        hub = Hub(host or LOOPBACK, int(port or 0))
        self._store = hub.store
        told = Told(msgspec.to_builtins(self._config), str(self._checkpoints.resolve()))
        self._store.set("told", msgspec.json.encode(told).decode())
        for rank in range(1, first_remote(self._config)):
            self._children[rank] = self._start(rank, hub)
        self._await_all(f"{hub.host}:{hub.port}")
        on_loopback(hub.host)
        ranks = join(settings, 0, dist.PrefixStore("world/", hub.store))
        self._orders = Orders(hub.store)
        watcher = threading.Thread(target=self._watch, args=(hub.store.clone(),), name="watching ranks", daemon=True)
        watcher.start()
        return ranks

    def _start(self, rank: int, hub: Hub) -> "subprocess.Popen[bytes]":
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "async_rl.services.trainer.follower", hub.host, str(hub.port), str(rank)]
        with (self._logs / f"trainer-{rank}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, PARENT: str(os.getpid())},
                start_new_session=True,  # a Ctrl-C is for the leading rank, which tells the others
            )

    def _await_all(self, where: str) -> None:
        assert self._store is not None
        collective_s = self._config.trainer.collective_s
        until = time.monotonic() + collective_s
        missing = list(range(1, self._config.trainer.ranks))
        while missing := [rank for rank in missing if not self._store.check([here(rank)])]:
            self._require_alive()
            if self._over.is_set():
                raise AsyncRLError("the trainer was stopped while it waited for its ranks")
            if time.monotonic() > until:
                ranks = ", ".join(map(str, missing))
                raise DeadlineExceeded(f"rank {ranks} of the trainer at {where}", collective_s, "trainer.collective_s")
            time.sleep(0.05)

    def _require_alive(self) -> None:
        for rank, child in self._children.items():
            if child.poll() is not None:
                log_file = self._logs / f"trainer-{rank}.log"
                raise AsyncRLError(f"rank {rank} of the trainer ended with status {child.returncode}: see {log_file}")

    def _watch(self, store: Any) -> None:
        """End this process when a rank is lost: what it waits for in an exchange may never come."""
        pulse = Pulses(self._config.trainer.collective_s)
        others = range(1, self._config.trainer.ranks)
        while not self._over.wait(WATCH_S):
            try:
                self._require_alive()
                for rank in others:
                    if rank not in self._children:
                        pulse.feel(rank, store.get(beat(rank)) if store.check([beat(rank)]) else b"", time.monotonic())
            except AsyncRLError as error:
                self._end(RankLost.exit_status, str(error))
            ends = [
                msgspec.json.decode(store.get(failed(rank)), type=Failed)
                for rank in others
                if store.check([failed(rank)])
            ]
            if ends and not self._over.wait(SAME_S):
                end = min(ends, key=lambda end: end.status)  # the cause before what followed from it
                self._end(end.status, f"rank {end.rank}: {end.reason}")

    def _end(self, status: int, reason: str) -> None:
        if self._over.is_set():
            return
        log.error("trainer: error: %s", reason)
        logging.shutdown()
        self.kill()
        os._exit(status)


@contextlib.contextmanager
def _with_others() -> Iterator[None]:
    """RankLost where an exchange with them failed."""
    try:
        yield
    except RuntimeError as error:
        if not exchange_failed(error):
            raise
        time.sleep(SAME_S)  # for the watching thread to say which rank it was, and end this process
        raise RankLost(f"an exchange between the ranks failed: {error}") from None


class Pulses:
    """When each rank was heard last. limit_s: of silence."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[int, tuple[bytes, float]] = {}

    def feel(self, rank: int, beat: bytes, now: float) -> None:
        """DeadlineExceeded where it has been the same for too long."""
        last, since = self._heard.setdefault(rank, (beat, now))
        if beat != last:
            self._heard[rank] = (beat, now)
        elif now - since > self._limit_s:
            raise DeadlineExceeded(f"a sign of life of rank {rank}", self._limit_s, "trainer.collective_s")


def on_loopback(host: str) -> None:
    """gloo looks up the name of the host by itself, which may lead nowhere, where all ranks are on this one."""
    if host == LOOPBACK and sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def here(rank: int) -> str:
    return f"here/{rank}"


def beat(rank: int) -> str:
    return f"beat/{rank}"


def failed(rank: int) -> str:
    return f"failed/{rank}"


def answer(order: int, rank: int) -> str:
    return f"answer/{order}/{rank}"
