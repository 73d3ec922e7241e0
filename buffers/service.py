"""The buffer's actor: its mailbox around the pure state machine, the long polls, the ticker for lapses.

A request is one command of the machine. Its events go to the journal, who waits is woken, and only then comes
the answer. An Acquire, a Draw or a GetEvaluation that gets nothing sleeps until something changed and tries
again, until its own wait is over. The run ends by Close, by an ordered stop, or by what makes it impossible
to go on; that error is told to the trainer, too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from async_rl.actor.service import Service
from async_rl.buffers import evaluation, report
from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.group import Group, Lease
from async_rl.buffers.journal import Journal
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.journal.memory import MemoryJournal
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, InvariantError, UserError
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
        if tasks is None or held_out is None:
            from async_rl import data

            tasks = data.TaskStream(config.data, config.seed) if tasks is None else tasks
            held_out = data.held_out_tasks(config.data) if held_out is None else held_out
        self._tasks, self._held_out = tasks, held_out
        self._journal = journal
        self._machine = Machine(Settings.of(config, tasks=tasks.length, held_out=len(held_out)))
        self._changed = asyncio.Event()  # set at the next change, then replaced
        self._asking: dict[str, messages.Acquire] = {}  # the newest Acquire of each worker
        self._waiting: Waiting | None = None  # why the last draw got nothing
        self._failure: AsyncRLError | None = None  # what ends the run
        self._ending = asyncio.Event()  # closed, or failed
        self.version = 0

    # --- life ----------------------------------------------------------------------------------------

    async def main(self) -> None:
        """What the journal holds is read before anybody can ask."""
        self.run.create()
        if self._journal is None:
            self._journal = self._open_journal()
        try:
            await super().main()
        finally:
            await self._journal.close()

    def _open_journal(self) -> Journal:
        if not self.config.journal.enabled:
            return MemoryJournal()
        settings = self._machine.settings
        journal, state = DiskJournal.open(self.run.journal, settings, self.config.journal.max_bytes)
        self._machine = Machine(settings, state)
        self._note_end()
        if state.admitted:
            log.info("%s: goes on at version %d: %s", self.name, state.version, report.conservation_line(self._machine))
        return journal

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
        stop or a failure only the answers under way are waited for."""
        ending = asyncio.create_task(self._ending.wait(), name=f"{self.name} ending")
        stopping = asyncio.create_task(self.stopping.wait(), name=f"{self.name} stopping")
        try:
            await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            stopping.cancel()
        if self._failure is not None:
            log.error("%s: %s\n%s", self.name, self._failure, report.table(self._machine, time.monotonic()))
        elif not self._ending.is_set():
            self._machine.close("an ordered stop")
            await self._settle()
        else:
            await self._tell_workers()
        await asyncio.sleep(min(self.config.services.heartbeat_s, self.config.services.stop_s / 2))

    async def _tell_workers(self) -> None:
        give_up = time.monotonic() + self.config.services.stop_s
        while not self.stopping.is_set() and (now := time.monotonic()) < give_up:
            untold = [name for name, w in self._machine.roster.live(now).items() if not w.told]
            if not untold:
                return
            changed = self._changed
            await _wait(changed, min(give_up - now, self.config.services.lease_s / TICKS))
        log.warning("%s: workers left untold of the end (services.stop_s)", self.name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.services.lease_s / TICKS))
            for lease in self._machine.workers.lapse(time.monotonic()):
                log.warning("%s: %s of group %d lapsed", self.name, lease.stage, lease.group)
            await self._settle()

    async def _settle(self) -> None:
        """Make what happened durable and wake who waits for a change."""
        happened = self._machine.take()
        assert self._journal is not None
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

    def _fail(self, error: AsyncRLError) -> None:
        """The run ends with `error`; the first one stands."""
        self._failure = self._failure or error
        self._ending.set()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- requests ------------------------------------------------------------------------------------

    async def handle(self, request: Any) -> Any:
        """One command; the answer is sent when its events are durable."""
        try:
            match request:
                case messages.Acquire(wait_s=wait_s):
                    self._asking[request.worker] = request
                    granted = await self._poll(lambda: self._acquire(request), wait_s)
                    return granted or messages.Leases()
                case messages.Draw(wait_s=wait_s):
                    drawn = await self._poll(lambda: self._draw(request), wait_s)
                    return drawn or messages.NotYet(self._why_no_draw())
                case messages.GetEvaluation(version, wait_s):
                    done = await self._poll(lambda: self._evaluation(version), wait_s)
                    return done or messages.NotYet(self._why_no_evaluation(version))
                case _:
                    return self._command(request)
        except (InvariantError, UserError) as error:  # a defect, or a task that cannot be read: the run ends
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
            case messages.Started(worker, incarnation, lease, version):
                return workers.started(worker, incarnation, lease, version, now)
            case messages.FinishGenerate(worker, incarnation, lease, member, trajectory):
                return workers.finish_generate(worker, incarnation, lease, member, trajectory, now)
            case messages.FinishScore(worker, incarnation, lease, member, score):
                return workers.finish_score(worker, incarnation, lease, member, score, now)
            case messages.Fail(worker, incarnation, lease, member, reason, fault):
                log.warning("%s: %s gives group %d back: %s", self.name, worker, lease.group, reason)
                return workers.fail(worker, incarnation, lease, member, reason, now, fault=fault)
            case messages.FinishStep(step, epoch):
                return messages.StepFinished(trainer.finish_step(step, epoch))
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

    async def _poll(self, attempt: Callable[[], Any], wait_s: float) -> Any:
        """What `attempt` gives as soon as it gives something; None after `wait_s`."""
        give_up = time.monotonic() + wait_s
        while True:
            changed = self._changed
            answer = attempt()
            left = give_up - time.monotonic()
            if answer is not None or left <= 0 or self.stopping.is_set():
                return answer
            await self._settle()
            await _wait(changed, left)

    def _acquire(self, request: messages.Acquire) -> messages.Leases | None:
        if self._asking[request.worker] is not request:
            return messages.Leases()  # asked again over a new connection: nobody would take this answer
        leases = self._machine.workers.acquire(
            request.worker, request.incarnation, request.stage, request.n, request.version, time.monotonic()
        )
        if self._tell_ended(request.worker):
            return messages.Leases(ended=True)
        return self._lease_messages(leases) if leases else None

    def _draw(self, request: messages.Draw) -> messages.Drawn | messages.DataEnded | None:
        answer = self._machine.trainer.draw(request.step, request.epoch)
        match answer:
            case Batch():
                return self._drawn(answer, request.step)
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
            self._wake()
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
                trajectories = [(member, group.trajectories[member]) for member in lease.open]
                score.append(messages.ScoreLease(lease.id, self._task(group), trajectories))
        return messages.Leases(generate, score)

    def _generate(self, group: Group, lease: Lease) -> messages.GenerateLease:
        sampling, greedy = self.config.sampling, False
        if group.exact_version is not None:
            temperature = self.config.evaluation.temperature
            greedy = temperature == 0
            sampling = msgspec.structs.replace(sampling, temperature=1.0 if greedy else temperature)
        return messages.GenerateLease(
            id=lease.id,
            task=self._task(group),
            members=list(lease.open),
            sampling=sampling,
            greedy=greedy,
            min_version=lease.min_version,
            exact_version=group.exact_version,
        )

    def _drawn(self, batch: Batch, step: int) -> messages.Drawn:
        state = self._machine.state
        return messages.Drawn(
            step=step,
            groups=[self._drawn_group(group) for group in batch.groups],
            dropped_stale=state.dropped.get("stale", 0),
            failed=sum(state.failed.values()),
            sequence=step - batch.step,
        )

    def _drawn_group(self, group: Group) -> messages.DrawnGroup:
        members = [messages.DrawnMember(m, group.trajectories[m], group.scores[m]) for m in group.wanted]
        hard_max = self._machine.settings.hard_max
        bound = group.eta if hard_max is None else hard_max
        return messages.DrawnGroup(group.id, group.attempt, self._task(group), bound, members)

    def _task(self, group: Group) -> Task:
        return self._tasks.task(group.position) if group.id >= 0 else self._held_out[group.position]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
