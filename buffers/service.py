"""The buffer's actor: its mailbox around the pure state machine, the long polls, the ticker for lapses.

A request is one command of the machine. Its events go to the journal, who waits is woken, and only then comes
the answer. An Acquire, a Draw or a GetEvaluation that gets nothing sleeps until something changed and tries
again, until its own wait is over. The run ends by Close, by an ordered stop, or by what makes it impossible
to go on; that error is told to the trainer, too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from async_rl.actor.service import Service
from async_rl.buffers import evaluation, grants, report, store
from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.group import Group, Lease
from async_rl.buffers.journal import Journal
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.journal.memory import MemoryJournal
from async_rl.buffers.line import Line, Wants
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch, State, new_state
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, InvariantError, JournalDamaged, UserError
from async_rl.protocol import buffer as messages
from async_rl.protocol.control import Done
from async_rl.trajectory import Task

log = logging.getLogger(__name__)

TICKS = 10
"""How often a lease's term is looked at during it."""


class Tasks(Protocol):
    """The stream of training tasks; async_rl.data.TaskStream is one."""

    @property
    def length(self) -> int | None:
        """None: endless."""
        ...

    def task(self, position: int) -> Task: ...


class BufferService(Service):
    """tasks, held_out, journal: for tests; by default what `config.data` names, and the run's journal."""

    kind = "buffer"
    requests, replies = messages.BufferRequest, messages.BufferReply

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        tasks: Tasks | None = None,
        held_out: Sequence[Task] | None = None,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(config, name)
        fingerprint: dict[str, str] = {}
        if tasks is None or held_out is None:
            from async_rl import data

            fingerprint = data.fingerprint(config.data, config.seed)
            tasks = data.TaskStream(config.data, config.seed) if tasks is None else tasks
            held_out = data.held_out_tasks(config.data) if held_out is None else held_out
        self._tasks, self._held_out = tasks, held_out
        self._settings = Settings.of(config, tasks=tasks.length, held_out=len(held_out), data=fingerprint)
        self._given = journal
        self._workers: dict[messages.Stage, Line] = {"generate": Line(), "score": Line()}
        self._others = Line()  # the trainer, and this service's own end
        self._asking: dict[str, messages.Acquire] = {}  # the newest Acquire of each worker
        self._waiting: Waiting | None = None  # why the last draw got nothing
        self._failure: AsyncRLError | None = None  # what ends the run
        self._ending = asyncio.Event()  # closed, or failed
        self.version = 0

    # --- life ----------------------------------------------------------------------------------------

    async def main(self) -> None:
        """What the journal holds is read before anybody can ask."""
        self.run.create()
        self._journal, state = self._open_journal()
        try:
            self._machine = Machine(self._settings, state, store=self._journal, task_of=self._tasks.task)
            self._machine.go_on(self._settings, complete=self.run.summary.exists())
            await self._settle()
            self._note_end()
            if state.admitted:
                line = report.conservation_line(self._machine)
                log.info("%s: goes on at version %d: %s", self.name, state.version, line)
            await super().main()
        finally:
            await self._journal.close()

    def _open_journal(self) -> tuple[Journal, State]:
        if self._given is not None:
            return self._given, new_state(self._settings)
        if not self.config.journal.enabled:
            return MemoryJournal(), new_state(self._settings)
        return DiskJournal.open(self.run.journal, self._settings, self.config.journal)

    async def work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            ticker = tasks.create_task(self._tick(), name=f"{self.name} ticker")
            await self._until_over()
            ticker.cancel()
        log.info("%s: %s", self.name, report.conservation_line(self._machine))
        if self._failure is not None:
            raise self._failure

    async def _until_over(self) -> None:
        """Until the run is closed and every live worker was told, or services.stop_s passed; after an ordered
        stop or a failure only the answers under way are waited for. A run whose buffer is stopped is not over:
        the others wait for the next one."""
        ending = asyncio.create_task(self._ending.wait(), name=f"{self.name} ending")
        stopping = asyncio.create_task(self.stopping.wait(), name=f"{self.name} stopping")
        try:
            await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            stopping.cancel()
        if self._failure is not None:
            log.error("%s: %s\n%s", self.name, self._failure, report.table(self._machine, time.monotonic()))
        elif self._ending.is_set():
            await self._tell_workers()
        else:
            self._wake_all()
        await asyncio.sleep(min(self.config.services.heartbeat_s, self.config.services.stop_s / 2))

    async def _tell_workers(self) -> None:
        give_up = time.monotonic() + self.config.services.stop_s
        while not self.stopping.is_set() and (now := time.monotonic()) < give_up:
            untold = [name for name, w in self._machine.roster.live(now).items() if not w.told]
            if not untold:
                return
            with self._others.place() as place:
                await place.wait(min(give_up - now, self.config.services.lease_s / TICKS))
        log.warning("%s: workers left untold of the end (services.stop_s)", self.name)

    def detail(self) -> dict[str, float | int | str]:
        state = self._machine.state
        return {"held": state.held, "trained": state.trained, "leases": len(state.leases), **self._journal.footprint()}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.services.lease_s / TICKS))
            for lease in self._machine.workers.lapse(time.monotonic()):
                log.warning("%s: %s of group %d lapsed", self.name, lease.stage, lease.group)
            self._forget(self._machine.roster.gone(time.monotonic()))
            await self._settle()

    def _forget(self, workers: Iterable[str]) -> None:
        for worker in workers:
            self._asking.pop(worker, None)
            self._others.wake_all()  # the end may have waited for it

    async def _settle(self) -> None:
        """Make what happened durable and wake who waits for a change."""
        happened = self._machine.take()
        try:
            await self._journal.append(happened)
        except AsyncRLError as error:  # nothing can be acknowledged any more
            self._fail(error)
            raise
        if happened:
            self._note_end()
            self._wake()

    def _note_end(self) -> None:
        """What the state says of the version, and of the end of the run."""
        state = self._machine.state
        self.version = state.version
        if state.broken is not None:
            self._fail(AsyncRLError(state.broken))
        if state.closed is not None:
            self._ending.set()
            self._wake_all()

    def _fail(self, error: AsyncRLError) -> None:
        """The run ends with `error`; the first one stands."""
        self._failure = self._failure or error
        self._ending.set()
        self._wake_all()

    def _wake(self) -> None:
        """Something changed: who waits may try again."""
        self._others.wake_all()
        for stage, line in self._workers.items():
            if grants.any_work(self._machine.state, stage):
                line.wake()

    def _wake_all(self) -> None:
        for line in (*self._workers.values(), self._others):
            line.wake_all()

    # --- requests ------------------------------------------------------------------------------------

    async def handle(self, request: Any) -> Any:
        """One command; the answer is sent when its events are durable."""
        try:
            match request:
                case messages.Acquire(wait_s=wait_s):
                    self._asking[request.worker] = request
                    line, wants = self._workers[request.stage], (request.version, request.n)
                    granted = await self._poll(lambda: self._acquire(request), wait_s, line, wants, request.worker)
                    return granted or messages.Leases()
                case messages.Withdraw(worker, stage):
                    self._asking.pop(worker, None)
                    self._workers[stage].call(worker)
                    return Done()
                case messages.Draw(wait_s=wait_s):
                    drawn = await self._poll(lambda: self._draw(request), wait_s, self._others)
                    return drawn or messages.NotYet(self._why_no_draw())
                case messages.GetEvaluation(version, wait_s):
                    done = await self._poll(lambda: self._evaluation(version), wait_s, self._others)
                    return done or messages.NotYet(self._why_no_evaluation(version))
                case _:
                    return self._command(request)
        except (InvariantError, JournalDamaged, UserError) as error:  # a defect, or what cannot be read: the run ends
            self._fail(error)
            raise
        finally:
            await self._settle()

    def _command(self, request: Any) -> Any:
        workers, trainer, now = self._machine.workers, self._machine.trainer, time.monotonic()
        match request:
            case messages.Extend(worker, incarnation, leases, stats):
                revoked = workers.extend(worker, incarnation, leases, stats, now)
                return messages.Extended(revoked, self._tell_ended(worker))
            case messages.Leave(worker, incarnation):
                log.info("%s: %s leaves", self.name, worker)
                self._forget(self._machine.roster.leave(worker, incarnation))
                return Done()
            case messages.Started(worker, incarnation, lease, version):
                return workers.started(worker, incarnation, lease, version, now)
            case messages.FinishGenerate(worker, incarnation, results):
                take = partial(workers.finish_generate, worker, incarnation, now=now)
                return messages.LeaseReplies([take(r.lease, r.member, r.trajectory) for r in results])
            case messages.FinishScore(worker, incarnation, results):
                score = partial(workers.finish_score, worker, incarnation, now=now)
                return messages.LeaseReplies([score(r.lease, r.member, r.score) for r in results])
            case messages.Fail(worker, incarnation, lease, member, reason, fault):
                log.warning("%s: %s gives group %d back: %s", self.name, worker, lease.group, reason)
                return workers.fail(worker, incarnation, lease, member, reason, now, fault=fault)
            case messages.Begin(epoch, at, cursor):
                log.info("%s: trainer %d begins with version %d", self.name, epoch, at)
                return messages.Begun(trainer.begin(epoch, at, cursor))
            case messages.FinishStep(step, epoch):
                return messages.StepFinished(trainer.finish_step(step, epoch))
            case messages.Checkpointed(version, epoch):
                trainer.checkpointed(version, epoch)
                return Done()
            case messages.GetCursor():
                return messages.DataCursor(trainer.cursor())
            case messages.Evaluate(version):
                trainer.evaluate(version)
                return Done()
            case messages.Close(reason):
                log.info("%s: closed: %s", self.name, reason)
                self._machine.close(reason)
                return Done()
            case messages.GetBuffer():
                return report.buffer_report(self._machine, now)
        raise AsyncRLError(f"{self.name} has no answer to {type(request).__name__}")

    async def _poll(
        self, attempt: Callable[[], Any], wait_s: float, line: Line, wants: Wants = (0, 0), asker: str = ""
    ) -> Any:
        """What `attempt` gives as soon as it gives something; None after `wait_s`. Waits in `line` meanwhile."""
        give_up, has_turn = time.monotonic() + wait_s, False
        while True:
            with line.place(wants, asker) as place:
                answer = None
                try:
                    answer = attempt()
                finally:
                    if has_turn and self._machine.idle:
                        line.pass_on(wants if answer is None else None)
                left = give_up - time.monotonic()
                if answer is not None or left <= 0 or self.stopping.is_set():
                    return answer
                await self._settle()
                await place.wait(left)
            has_turn = place.turn.is_set()

    def _acquire(self, request: messages.Acquire) -> messages.Leases | None:
        if self._asking.get(request.worker) is not request:
            return messages.Leases()  # withdrawn, or asked again over a new connection: nobody would take it
        if not self._machine.state.epoch and not self._ending.is_set():
            return None  # the trainer says first where the run stands
        leases = self._machine.workers.acquire(
            request.worker, request.incarnation, request.stage, request.n, request.version, time.monotonic()
        )
        if self._tell_ended(request.worker):
            return messages.Leases(ended=True)
        return self._lease_messages(leases) if leases else None

    def _draw(self, request: messages.Draw) -> messages.Drawn | messages.DataEnded | None:
        try:
            draw = self._machine.trainer.made(request.step, request.epoch)
            if draw is not None:
                return store.drawn(draw, request.step, self._journal.get)
        except JournalDamaged as error:
            raise JournalDamaged(f"step {request.step} cannot be made again: {error}") from None
        answer = self._machine.trainer.draw(request.step, request.epoch)
        match answer:
            case Batch(place=place):
                return store.drawn(self._journal.get_draw(place), request.step, self._journal.get)
            case Ended(reason):
                return messages.DataEnded(reason)
            case Waiting():
                self._waiting = answer
                return None

    def _why_no_draw(self) -> str:
        assert self._waiting is not None
        return report.waiting_reason(self._machine, self._waiting, time.monotonic())

    def _evaluation(self, version: int) -> messages.EvaluationReport | None:
        done = self._machine.trainer.evaluation(version)
        return None if done is None else evaluation.report(done, self._held_out)

    def _why_no_evaluation(self, version: int) -> str:
        pending = self._machine.state.evaluations[version]
        done = f"{len(pending.marks)} of {pending.tasks} tasks at version {pending.version}"
        return f"the evaluation of version {version} has {done}; evaluation.wait_s bounds the wait"

    def _tell_ended(self, worker: str) -> bool:
        ended = self._ending.is_set()
        if ended:
            self._machine.roster.tell_ended(worker)
            self._others.wake_all()
        return ended

    # --- what goes out -------------------------------------------------------------------------------

    def _lease_messages(self, leases: list[Lease]) -> messages.Leases:
        generate: list[messages.GenerateLease] = []
        score: list[messages.ScoreLease] = []
        for lease in leases:
            group = self._machine.state.pool(lease.id.group).groups[lease.id.group]
            if lease.id.stage == "generate":
                generate.append(self._generate(group, lease))
            else:
                trajectories = [(m, self._journal.get(group.trajectories[m].place)) for m in lease.open]
                score.append(messages.ScoreLease(lease.id, self._task(group), trajectories))
        return messages.Leases(generate, score)

    def _generate(self, group: Group, lease: Lease) -> messages.GenerateLease:
        sampling, greedy = self.config.sampling, [m for m in lease.open if m == group.greedy]
        if group.exact_version is not None:
            temperature = self.config.evaluation.temperature
            greedy = list(lease.open) if temperature == 0 else []
            sampling = msgspec.structs.replace(sampling, temperature=temperature or 1.0)
        return messages.GenerateLease(
            id=lease.id,
            task=self._task(group),
            members=list(lease.open),
            sampling=sampling,
            greedy=greedy,
            min_version=lease.min_version,
            exact_version=group.exact_version,
        )

    def _task(self, group: Group) -> Task:
        return self._tasks.task(group.position) if group.id >= 0 else self._held_out[group.position]
