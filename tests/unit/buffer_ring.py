"""A ring on the pure machine: scripted workers and a trainer in simulated time, each draw checked."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch
from async_rl.protocol.buffer import LeaseId, WorkerStats
from async_rl.trajectory import Score, Spans, extend_spans
from tests.unit.buffer_material import trajectory, versions


@dataclass
class Job:
    """A member that a worker samples: its tokens so far, and the time at which it is done."""

    lease: LeaseId
    member: int
    done: float
    spans: Spans


@dataclass
class RingWorker:
    name: str
    capacity: int
    delay: float  # between a commit and the new weights here
    version: int = 0
    incarnation: int = 0
    jobs: list[Job] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.incarnation)


@dataclass
class Ring:
    """Plays a run of `machine` in steps of simulated time and checks each draw.

    median, sigma: of the log-normal time of a member. faults: probability of a fault per worker and tick.
    """

    machine: Machine
    dice: random.Random
    workers: list[RingWorker]
    median: float = 3.0
    sigma: float = 1.0
    step_time: float = 2.0
    faults: float = 0.0
    durations: dict[int, float] = field(default_factory=dict)  # by position; instead of the log-normal
    now: float = 0.0
    idle: float = 0.0
    batches: list[list[int]] = field(default_factory=list)
    positions: Counter[int] = field(default_factory=Counter)  # how often a task was drawn
    drawn: list[list[tuple[int, int, list[int]]]] = field(default_factory=list)  # of each: position, attempt, members
    max_lag: int = -1
    ended: str | None = None
    log: list[Any] = field(default_factory=list)
    keep_events: bool = False
    _committed: list[float] = field(default_factory=lambda: [0.0])  # time at which each version appeared
    _training: float | None = None

    def run(self, limit: float) -> str:
        """Until the data or the steps end; AssertionError after `limit` units of time."""
        while self.ended is None:
            self.now += 1.0
            assert self.now < limit, f"no end: step {self.machine.state.version} of {self.machine.settings}"
            for worker in self.workers:
                self._tick(worker)
            self._grade()
            self.machine.workers.lapse(self.now)
            self._train()
            happened = self.machine.take()
            if self.keep_events:
                self.log.extend(happened)
        return self.ended

    # --- workers

    def _tick(self, worker: RingWorker) -> None:
        if self.faults and self.dice.random() < self.faults:
            self._fault(worker)
        self._update(worker)
        for job in worker.jobs:
            extend_spans(job.spans, worker.version, 1)
        self._report(worker)
        for job in [job for job in worker.jobs if job.done <= self.now]:
            worker.jobs.remove(job)
            self.machine.workers.finish_generate(
                worker.name, worker.id, job.lease, job.member, trajectory(*job.spans), self.now
            )
        self._acquire(worker)

    def _update(self, worker: RingWorker) -> None:
        newest = max(v for v, at in enumerate(self._committed) if v == 0 or at + worker.delay <= self.now)
        if self.machine.settings.in_flight or not worker.jobs:
            worker.version = max(worker.version, newest)

    def _acquire(self, worker: RingWorker) -> None:
        free = worker.capacity - len(worker.jobs)
        behind = worker.version < len(self._committed) - 1 and not self.machine.settings.in_flight
        if free < 1 or (behind and worker.jobs):
            return
        leases = self.machine.workers.acquire(worker.name, worker.id, "generate", free, worker.version, self.now)
        assert sum(len(lease.open) for lease in leases) <= free
        for lease in leases:
            assert worker.version >= lease.min_version, "born stale"
            group = self.machine.state.pool(lease.id.group).groups[lease.id.group]
            for member in lease.open:
                lasts = self.durations.get(group.position) or self._duration()
                worker.jobs.append(Job(lease.id, member, self.now + lasts, []))
            if self.dice.random() < 0.7:
                self.machine.workers.started(worker.name, worker.id, lease.id, worker.version, self.now)

    def _report(self, worker: RingWorker) -> None:
        held: dict[LeaseId, int] = {}
        for job in worker.jobs:
            oldest = min(version for version, _ in job.spans)
            held[job.lease] = min(held.get(job.lease, oldest), oldest)
        revoked = self.machine.workers.extend(worker.name, worker.id, list(held.items()), WorkerStats(), self.now)
        gone = {lease for lease, _ in revoked}
        worker.jobs = [job for job in worker.jobs if job.lease not in gone]

    def _fault(self, worker: RingWorker) -> None:
        kind = self.dice.choice(("member", "lease", "death", "lost"))
        if kind == "death":
            worker.incarnation += 1
            worker.jobs.clear()
        elif worker.jobs:
            job = self.dice.choice(worker.jobs)
            if kind == "lost":  # the worker forgets a lease: it lapses
                worker.jobs = [other for other in worker.jobs if other.lease != job.lease]
                return
            member = job.member if kind == "member" else None
            self.machine.workers.fail(worker.name, worker.id, job.lease, member, "scripted", self.now)
            worker.jobs = [
                other for other in worker.jobs if other.lease != job.lease or (kind == "member" and other is not job)
            ]

    def _duration(self) -> float:
        return max(1.0, self.median * self.dice.lognormvariate(0.0, self.sigma))

    def _grade(self) -> None:
        for lease in self.machine.workers.acquire("reward-0", "r", "score", 10_000, -1, self.now):
            for member in list(lease.open):
                if self.faults and self.dice.random() < self.faults:
                    reply = self.machine.workers.fail("reward-0", "r", lease.id, member, "scripted", self.now)
                else:
                    score = Score(self.dice.random())
                    reply = self.machine.workers.finish_score("reward-0", "r", lease.id, member, score, self.now)
                assert reply.outcome == "accepted", reply

    # --- trainer

    def _train(self) -> None:
        state = self.machine.state
        if self._training is not None:
            if self.now < self._training:
                return
            self._training = None
            self.machine.trainer.finish_step(state.version, 0)
            self._committed.append(self.now)
        step = state.version
        drawn = self.machine.trainer.draw(step, 0)
        match drawn:
            case Ended(reason):
                self.ended = reason
            case Waiting():
                self.idle += 1.0
            case Batch():
                assert self.machine.trainer.draw(step, 0) is drawn
                self._check(drawn, step)
                self._training = self.now + self.step_time

    def _check(self, batch: Batch, step: int) -> None:
        rules = self.machine.settings
        if step == batch.step:
            numbers = [group.id for group in batch.groups]
            seen = {number for earlier in self.batches for number in earlier}
            assert not seen & set(numbers), "a group in two draws"
            order = [(self.machine.state.deadline(group), group.id) for group in batch.groups]
            assert order == sorted(order), "not in deadline and admission order"
            self.batches.append(numbers)
            self.positions.update(group.position for group in batch.groups)
            self.drawn.append([(group.position, group.attempt, list(group.wanted)) for group in batch.groups])
        for group in batch.groups:
            lags = [step - version for m in group.voters for version, _ in versions(self.machine, group, m)]
            assert lags and min(lags) >= 0
            bound = group.eta if rules.hard_max is None else rules.hard_max
            if rules.on_exceed == "mask":
                lags = [lag for lag in lags if lag <= bound]
                assert lags, "a group with no token inside the bound"
            assert max(lags) <= bound, f"lag {max(lags)} over {bound} in step {step}"
            self.max_lag = max(self.max_lag, *lags)


def ring(rules: Settings, seed: int, *, workers: int = 2, **changes: Any) -> Ring:
    dice = random.Random(seed)
    capacity = rules.group_size * dice.choice((1, 2, 4))
    crew = [RingWorker(f"rollout-{i}", capacity, dice.choice((0.0, 1.0, 5.0))) for i in range(workers)]
    return Ring(Machine(rules), dice, crew, **changes)
