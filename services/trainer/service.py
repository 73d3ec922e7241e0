"""The trainer's service. It begins with the newest checkpoint, if there is one, and makes the steps again that the
run made since then, with the same draws and nothing published. Then, for each step of the run

    draw        wait for the batch, at most trainer.draw_wait_s      unblocked by the buffer
    update      when it has the device; in a thread of its own, so that heartbeats go on
    finish      the buffer has the step durably: the version rises   before anyone can see the weights
    publish     to the relays, never to a rollout
    evaluate, checkpoint where due

A publication that fails leaves the receivers on the version they have; the run goes on.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from async_rl.actor.remote import Remote
from async_rl.actor.service import Service
from async_rl.config.modes import bounds
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, DeadlineExceeded, InvariantError, PeerRefused, PublicationError
from async_rl.models.load import trainable
from async_rl.protocol.buffer import (
    Begin,
    Begun,
    BufferReply,
    BufferReport,
    BufferRequest,
    Checkpointed,
    Close,
    DataCursor,
    DataEnded,
    Draw,
    Drawn,
    EvaluationReport,
    FinishStep,
    GetBuffer,
    GetCursor,
    NotYet,
)
from async_rl.protocol.control import ControlReply, ControlRequest, Stop
from async_rl.protocol.weight_sync import Fence, WeightSyncReply, WeightSyncRequest
from async_rl.services.trainer import lora
from async_rl.services.trainer.concerns import Concerns
from async_rl.services.trainer.evaluation import Evaluations
from async_rl.services.trainer.metrics import EvaluationRecord, MetricsFile, step_record
from async_rl.services.trainer.orders import Load, Save, Step
from async_rl.services.trainer.placement import turns
from async_rl.services.trainer.summary import summary, write
from async_rl.services.trainer.team import Team
from async_rl.weights.order import Order, Outcome
from async_rl.weights.relays import folder_of, relay_names
from async_rl.weights.writer import Publisher

POLL_S = 2.0  # of a long poll: how late an ordered stop is noticed
log = logging.getLogger(__name__)
T = TypeVar("T")


class TrainerService(Service):
    kind = "trainer"
    requests, replies = ControlRequest, ControlReply

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._stage = "starting"
        self._metrics = MetricsFile(self.run.metrics)
        self._concerns, self._concern = Concerns(), ""
        self._failed_publications = 0
        self._writing: asyncio.Task[None] | None = None  # of a checkpoint
        self._published = -1  # newest version that became visible
        self._started = time.monotonic()

    async def work(self) -> None:
        buffer = self.remote("buffer", BufferRequest, BufferReply)
        relays = {name: self._relay(name) for name in relay_names(self.config)}
        # One thread for all of torch's work: the number of torch threads is a thread's own setting.
        with ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (self.config.trainer.threads,)) as thread:
            self._thread, self._team = thread, Team(self.config, self.run.checkpoints, self.run.logs)
            try:
                async with buffer, contextlib.AsyncExitStack() as entered:
                    for relay in relays.values():
                        await entered.enter_async_context(relay)
                    await self._work(buffer, relays)
            except BaseException:
                self._team.kill()
                raise
            await self._in_thread(self._team.close)

    def _relay(self, name: str) -> Remote:
        return self.remote("weight_sync", WeightSyncRequest, WeightSyncReply, name=lambda: name)

    async def _work(self, buffer: Remote, relays: dict[str, Remote]) -> None:
        config, team = self.config, self._team
        self._stage = "waiting for the ranks"
        if not await self._gathered():
            return
        self._stage = "loading the model"
        self._device = turns(config, self.run, lambda: team.work.loaded, self._in_thread)
        async with self._device.turn():
            await self._in_thread(lambda: team.do(Load(trainable(config.model, self.run.path / "policy"))))
        self.version, cursor = team.work.version, team.work.cursor
        self._epoch = self.run.next_trainer_epoch()
        self._stage = "telling the others that it begins"
        await asyncio.gather(*(relay.ask(Fence(self._epoch)) for relay in relays.values()))
        begun: Begun = await buffer.ask(Begin(self._epoch, self.version, cursor))
        self._metrics.go_on(begun.version)
        self._started = time.monotonic() - self._metrics.wall_s
        self._publisher = Publisher(
            relays,
            config.weight_sync,
            epoch=self._epoch,
            ranks=config.trainer.ranks,
            everywhere=self._everywhere if config.trainer.ranks > 1 else None,
            dtype=config.model.dtype if config.trainer.dtype and config.model.lora is None else None,
            folder=folder_of(config, self.run),
            peers=[address for name in relays if (address := self._address_of(name))],
        )
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            announcing = tasks.create_task(self._publisher.announce_forever(), name="announcing weights")
            known = self._metrics.evaluations
            evaluations = Evaluations(buffer, tasks, self._evaluated, config.evaluation.wait_s, known)
            await self._make_again(buffer, begun.version)
            ended = await self._train(buffer, evaluations)
            if self.stopping.is_set():
                await self._leave(buffer, evaluations)
            else:
                await self._close(buffer, evaluations, ended)
            announcing.cancel()
        if not self.stopping.is_set():
            await asyncio.gather(*(self._dismiss(name, relay, ended) for name, relay in relays.items()))
        self._stage = "done"

    async def _gathered(self) -> bool:
        """Whether the ranks are there; not so where an ordered stop comes first."""
        gathering = asyncio.ensure_future(self._in_thread(self._team.__enter__))
        stop = asyncio.create_task(self.stopping.wait(), name="stop while waiting for ranks")
        await asyncio.wait({gathering, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not gathering.done():
            self._team.kill()
            await asyncio.gather(gathering, return_exceptions=True)
            return False
        await gathering
        return True

    async def _make_again(self, buffer: Remote, version: int) -> None:
        """The steps from this trainer's version up to the buffer's, which are committed."""
        if self.version < version:
            log.info("steps %d to %d are made again", self.version, version - 1)
        for step in range(self.version, version):
            asked = time.monotonic()
            drawn = await self._draw(buffer, step)
            if not isinstance(drawn, Drawn):
                return
            self._stage = f"making step {step} again"
            await self._step(drawn, asked)
            self.version = step + 1

    async def _train(self, buffer: Remote, evaluations: Evaluations) -> str:
        """The steps of the run; why they ended."""
        config = self.config
        if self.stopping.is_set():
            return "stopped"
        self._stage = f"publishing version {self.version}"
        await self._publish(self.version)
        if not self.version:
            self._started = time.monotonic()
        await self._take_up(buffer, evaluations)
        for step in range(self.version, config.max_steps):
            asked = time.monotonic()
            drawn = await self._draw(buffer, step)
            if not isinstance(drawn, Drawn):
                return drawn
            self._stage = f"updating with the batch of step {step}"
            await self._step(drawn, asked)
            self._stage = f"finishing step {step}"
            finished = await buffer.ask(FinishStep(step, self._epoch))
            if finished.version != step + 1:
                raise InvariantError(f"the buffer is at version {finished.version} after step {step}")
            self.version = step + 1
            self._stage = f"publishing version {self.version}"
            await self._publish(self.version)
            await self._whenever_due(buffer, evaluations)
        return "max_steps"

    async def _take_up(self, buffer: Remote, evaluations: Evaluations) -> None:
        """What an earlier trainer left undone at this version, and the evaluations it was waiting for."""
        config = self.config
        if not self.version:
            if config.data.held_out and config.evaluation.at_start:
                await evaluations.start(0)
            return
        if config.data.held_out:
            for version in range(self.version):
                if (version == 0 and config.evaluation.at_start) or _due(version, config.evaluation.every):
                    evaluations.take_up(version)
        await self._whenever_due(buffer, evaluations)

    async def _draw(self, buffer: Remote, step: int) -> Drawn | str:
        """The batch of `step`, or the reason why there is none."""
        wait_s = self.config.trainer.draw_wait_s
        deadline, reason = time.monotonic() + wait_s, "the buffer gave no reason"
        self._stage = "waiting for a draw"
        while not self.stopping.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the batch of step {step} ({reason})", wait_s, "trainer.draw_wait_s")
            poll = min(POLL_S, left)
            match await buffer.ask(Draw(step, self._epoch, poll), wait_s=poll):
                case Drawn() as drawn if drawn.step != step:
                    raise InvariantError(f"asked for the batch of step {step}, got that of {drawn.step}")
                case Drawn() as drawn:
                    return drawn
                case DataEnded(reason=reason):
                    return reason
                case NotYet(reason=reason):
                    self._stage = f"waiting for a draw: {reason}"
                    # nothing may come until the rollouts have it
                    if self._published < self.version or self._publisher.lacking:
                        await self._publish(self.version)
        return "stopped"

    async def _step(self, drawn: Drawn, asked: float) -> None:
        async with self._device.turn():
            began = time.monotonic()
            result = await self._in_thread(lambda: self._team.do(Step(drawn)))
            now = time.monotonic()
        record = step_record(
            drawn,
            result,
            on_exceed=bounds(self.config).on_exceed,
            wall_s=now - self._started,
            draw_wait_s=began - asked,
            train_s=now - began,
            held_out=self._newest_evaluation,
        )
        self._metrics.write(record)
        for concern in self._concerns.note(record):
            self._concern = f"step {record.step}: {concern}"
            log.warning("%s", self._concern)

    async def _publish(self, version: int) -> None:
        try:
            model = self._team.work.roles.policy.model
            await self._publisher.publish(version, lora.published(model), lora.info(model))
            self._published = version
        except PublicationError as error:
            self._failed_publications += 1
            log.warning("version %d was not published, receivers stay on theirs: %s", version, error)

    async def _everywhere(self, order: Order) -> list[Outcome]:
        return await asyncio.to_thread(self._team.carry_out, order)

    async def _whenever_due(self, buffer: Remote, evaluations: Evaluations) -> None:
        """An evaluation and a checkpoint of this version, where the settings ask for them."""
        config, last = self.config, self.version == self.config.max_steps
        if config.data.held_out and _due(self.version, config.evaluation.every) and not last:
            await evaluations.start(self.version)
        if _due(self.version, config.trainer.checkpoint_every):
            await self._checkpoint(buffer)

    async def _checkpoint(self, buffer: Remote) -> None:
        """Of this version, which the buffer has, too; it is written while training goes on. Where an ordered stop has
        taken the buffer away, its journal alone knows where the data stands."""
        await self._checkpoint_written()
        self._stage = f"copying version {self.version} for a checkpoint"
        place: DataCursor | None = await self._ask(buffer, GetCursor())
        if place is not None and place.cursor.version != self.version:
            raise InvariantError(f"the buffer is at version {place.cursor.version}, the trainer at {self.version}")
        cursor = None if place is None else place.cursor
        await self._in_thread(lambda: self._team.do(Save(self.version, cursor)))
        self._writing = self._tasks.create_task(self._write(buffer), name="writing a checkpoint")

    async def _write(self, buffer: Remote) -> None:
        """The buffer may forget what came before a checkpoint when that is whole, and not earlier."""
        checkpoints = self._team.work.checkpoints
        await asyncio.to_thread(checkpoints.finish)
        await self._ask(buffer, Checkpointed(checkpoints.versions[0], self._epoch))

    async def _checkpoint_written(self) -> None:
        if self._writing is not None:
            self._stage = "waiting for the checkpoint"
            await self._writing

    async def _leave(self, buffer: Remote, evaluations: Evaluations) -> None:
        """An ordered stop: the run goes on another time, so the buffer is not closed and there is no summary."""
        evaluations.cancel()
        if self.version:
            await self._checkpoint(buffer)
            await self._checkpoint_written()

    async def _close(self, buffer: Remote, evaluations: Evaluations, ended: str) -> None:
        """Last checkpoint, last evaluation, summary; then the buffer may send the workers home."""
        wall_s = time.monotonic() - self._started
        if self.version:
            await self._checkpoint(buffer)
            await self._checkpoint_written()
        if self.config.data.held_out and self.version:
            with contextlib.suppress(PeerRefused):  # a buffer that was closed from elsewhere
                await evaluations.start(self.version)
        self._stage = "waiting for the last evaluation"
        await evaluations.finish()
        self._stage = "closing"
        report: BufferReport = await buffer.ask(GetBuffer())
        generated_s = time.monotonic() - self._started
        final = summary(
            self.config,
            [record for _, record in sorted(self._metrics.steps.items())],
            [record for _, record in sorted(self._metrics.evaluations.items())],
            report,
            ended=ended,
            failed_publications=self._failed_publications,
            wall_s=wall_s,
            generated_s=generated_s,
            checkpoint=self._team.work.checkpoints.path(self.version) if self.version else None,
        )
        write(self.run.summary, final)
        await buffer.ask(Close(ended))

    async def _dismiss(self, name: str, relay: Remote, ended: str) -> None:
        """A relay may go. One that is gone already makes no failure of a run that is complete."""
        try:
            async with asyncio.timeout(self.config.services.stop_s / 2):
                await relay.ask(Stop(f"the run is over: {ended}"))
        except (TimeoutError, AsyncRLError) as error:
            log.warning("%s was not told of the end: %s", name, error or "it is gone")

    async def _ask(self, buffer: Remote, message: Any) -> Any:
        """The buffer's answer; None where an ordered stop has taken the buffer away already."""
        try:
            async with asyncio.timeout(self.config.services.stop_s / 2 if self.stopping.is_set() else None):
                return await buffer.ask(message)
        except (TimeoutError, AsyncRLError) as error:
            if not self.stopping.is_set():
                raise
            log.warning("no answer from the buffer: %s", error or "it is gone")
            return None

    def _evaluated(self, report: EvaluationReport) -> None:
        record = EvaluationRecord.of(report, time.monotonic() - self._started)
        self._metrics.write(record)
        reward = "unknown" if record.mean_reward is None else f"{record.mean_reward:.3f}"
        log.info("held-out: version %d, mean reward %s", record.version, reward)

    @property
    def _newest_evaluation(self) -> EvaluationRecord | None:
        known = self._metrics.evaluations
        return max(known.values(), key=lambda record: record.version, default=None)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def detail(self) -> dict[str, float | int | str]:
        """Figures for the live line: those that exist so far."""
        figures: dict[str, float | int | str | None] = {
            "stage": self._stage,
            "step": self.version,
            "version": self.version,
            "max_steps": self.config.max_steps,
            "concern": self._concern or None,
        }
        newest = self._newest_evaluation
        if newest is not None:
            figures["held_out"] = newest.mean_reward
        steps = self._metrics.steps
        if steps:
            last, wall_s = steps[max(steps)], time.monotonic() - self._started
            figures |= {
                "reward": last.reward_mean,
                "lag_mean": last.lag_mean,
                "lag_max": last.lag_max,
                "mismatch_kl": last.mismatch_kl_k3,
                "trained_tokens_per_s": sum(step.trained_tokens for step in steps.values()) / wall_s,
                "idle_share": sum(step.draw_wait_s for step in steps.values()) / wall_s,
            }
        return {key: value for key, value in figures.items() if value is not None}


def _due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
