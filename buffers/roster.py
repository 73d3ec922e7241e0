"""Who is alive, what each worker holds and did. Soft state: no journal keeps it, and after a restart of the
buffer every open lease has a full term again."""

import math
from collections.abc import Iterable

from msgspec import Struct, field

from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import LeaseId, Stage, WorkerStats

TERMS = 20
"""Terms of silence after which a worker is gone for good. One that comes back all the same is counted anew."""


class Worker(Struct):
    incarnation: str
    stage: Stage
    version: int
    seen: float
    stats: WorkerStats = WorkerStats()
    before: WorkerStats = WorkerStats()  # of its earlier incarnations, added up
    replaced: set[str] = field(default_factory=set)
    told: bool = False  # that the run is over


class Term(Struct):
    granted: float
    seen: float


class Roster:
    """Times are seconds of whatever clock the caller has."""

    def __init__(self, lease_s: float, lease_max_s: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.left: dict[Stage, WorkerStats] = {}  # what those did who are gone, added up
        self._terms: dict[LeaseId, Term] = {}
        self._lease_s, self._lease_max_s = lease_s, lease_max_s
        self._sharers = 0  # counted now and then: with a thousand workers that is most of a grant
        self._counted = -math.inf

    def greet(self, name: str, incarnation: str, stage: Stage, version: int, now: float) -> bool:
        """A worker asks for work; True where this incarnation of its name was not known: others are dead."""
        worker = self.workers.get(name)
        if worker is None:
            self.workers[name] = Worker(incarnation, stage, version, now)
            self._counted = -math.inf
            return True
        if incarnation in worker.replaced:
            raise AsyncRLError(f"{name}: incarnation {incarnation} was replaced by {worker.incarnation}")
        anew = incarnation != worker.incarnation
        if anew:
            worker.replaced.add(worker.incarnation)
            worker.before, worker.stats = plus(worker.before, worker.stats), WorkerStats()
            worker.incarnation, worker.told = incarnation, False
        worker.stage, worker.version, worker.seen = stage, version, now
        return anew

    def alive(self, name: str, incarnation: str, now: float) -> None:
        """A sign of life that is no greeting."""
        worker = self.workers.get(name)
        if worker is not None and worker.incarnation == incarnation:
            worker.seen = now

    def report(self, name: str, incarnation: str, stats: WorkerStats) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.incarnation == incarnation:
            worker.stats = stats

    def leave(self, name: str, incarnation: str) -> list[str]:
        """A worker goes; its name, unless another incarnation has it."""
        worker = self.workers.get(name)
        if worker is None or worker.incarnation != incarnation:
            return []
        self._drop([name])
        return [name]

    def gone(self, now: float) -> list[str]:
        """Workers silent for so long that nobody waits for them; forgets them."""
        silent = [name for name, w in self.workers.items() if now - w.seen > TERMS * self._lease_s]
        self._drop(silent)
        return silent

    def _drop(self, names: list[str]) -> None:
        for name in names:
            worker = self.workers.pop(name)
            self.left[worker.stage] = plus(self.left.get(worker.stage, WorkerStats()), total(worker))
            self._counted = -math.inf

    def tell_ended(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].told = True

    def live(self, now: float) -> dict[str, Worker]:
        """Workers seen within services.lease_s."""
        return {name: w for name, w in self.workers.items() if now - w.seen <= self._lease_s}

    def sharers(self, now: float) -> int:
        """Rollout workers alive, as of at most a twentieth of services.lease_s ago."""
        if now - self._counted > self._lease_s / 20:
            self._sharers = sum(worker.stage == "generate" for worker in self.live(now).values())
            self._counted = now
        return self._sharers

    def grant(self, lease: LeaseId, now: float) -> None:
        self._terms[lease] = Term(now, now)

    def extend(self, lease: LeaseId, now: float) -> None:
        """A sign of life of a lease; one that nobody has timed yet begins its term."""
        self._terms.setdefault(lease, Term(now, now)).seen = now

    def silent(self, leases: Iterable[LeaseId], now: float) -> list[LeaseId]:
        """Which of the open `leases` have had no sign of life for services.lease_s; forgets all others."""
        self._terms = {lease: self._terms.get(lease) or Term(now, now) for lease in leases}
        return [lease for lease, term in self._terms.items() if now - term.seen > self._lease_s]

    def overdue(self, leases: Iterable[LeaseId], now: float) -> list[LeaseId]:
        """Which of the open `leases` are not done services.lease_max_s after they were granted."""
        return [lease for lease in leases if now - self.granted(lease, now) > self._lease_max_s]

    def granted(self, lease: LeaseId, now: float) -> float:
        """When `lease` was granted; one that nobody has timed yet, now."""
        term = self._terms.get(lease)
        return now if term is None else term.granted

    def oldest(self, leases: Iterable[LeaseId]) -> LeaseId | None:
        """The lease that was granted first."""
        timed = [lease for lease in leases if lease in self._terms]
        return min(timed, key=lambda lease: self._terms[lease].granted, default=None)


def total(worker: Worker) -> WorkerStats:
    """The counts of all incarnations of a worker."""
    return plus(worker.before, worker.stats)


def plus(old: WorkerStats, new: WorkerStats) -> WorkerStats:
    return WorkerStats(
        up_s=old.up_s + new.up_s,
        busy_s=old.busy_s + new.busy_s,
        tokens=old.tokens + new.tokens,
        finished=old.finished + new.finished,
        updates=old.updates + new.updates,
        paused_s=old.paused_s + new.paused_s,
    )
