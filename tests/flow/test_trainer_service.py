"""The trainer's service against a scripted buffer and a scripted relay, over real sockets."""

import asyncio
import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from async_rl.actor.mailbox import Mailbox
from async_rl.actor.service import first_cause, run_id
from async_rl.config import parse
from async_rl.config.schema import Warmup
from async_rl.errors import AsyncRLError, ConfigError, DeadlineExceeded, PeerRefused
from async_rl.models.tiny import build_model, build_tokenizer
from async_rl.protocol.buffer import (
    Begin,
    Begun,
    BufferReply,
    BufferReport,
    BufferRequest,
    Checkpointed,
    Close,
    Cursor,
    DataCursor,
    DataEnded,
    Draw,
    Drawn,
    DrawnGroup,
    DrawnMember,
    Evaluate,
    EvaluationReport,
    FinishStep,
    GetBuffer,
    GetCursor,
    GetEvaluation,
    NotYet,
    SourceScore,
    StepFinished,
    WorkerStats,
)
from async_rl.protocol.control import ControlReply, ControlRequest, Done, GetStatus, Stop
from async_rl.protocol.weight_sync import (
    Commit,
    Fence,
    Offer,
    Rejected,
    Slot,
    Visible,
    WeightSyncReply,
    WeightSyncRequest,
)
from async_rl.services.trainer.service import TrainerService
from async_rl.trajectory import Score, Task, Trajectory

SETTINGS = Warmup(characters="abcdefghi", hidden_size=16, layers=1, heads=2)


def configuration(folder, **tables):
    tokenizer = build_tokenizer(SETTINGS)
    model = folder / "model"
    build_model(SETTINGS, tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    tree = {
        "name": "scripted",
        "runs": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {
            "train": [{"kind": "jsonl", "path": "none"}],
            "held_out": [{"kind": "jsonl", "path": "none"}],
        },
        "max_steps": 4,
        "batch": {"groups": 2, "group_size": 2},
        "trainer": {"learning_rate": 0.01, "checkpoint_every": 1},
        "evaluation": {"every": 2},
        "services": {"ask_s": 20, "connect_s": 20, "stop_s": 5},
    }
    return parse(tree | tables)


def trajectory(version, tokens):
    count = len(tokens)
    return Trajectory(
        tokens=np.array([4, 5, 6, *tokens], dtype=np.int32),
        action=np.array([False] * 3 + [True] * count),
        logprobs=np.array([0.0] * 3 + [-2.5] * count, dtype=np.float32),
        versions=[(version, count)],
        stop="eos",
        text="",
    )


class Buffer:
    """Gives a batch for every step below `batches`; `events` tells the order of what was asked."""

    def __init__(self, events, batches=99, after="not yet"):
        self.events, self.batches, self.after = events, batches, after
        self.polled, self.asked = set(), set()
        self.version, self.epoch = 0, 0
        self.begun = []
        self.checkpoints = []

    def batch(self, step):
        groups = [
            DrawnGroup(
                group=2 * step + g,
                attempt=0,
                task=Task(index=g, source="words", prompt="abc"),
                bound=2,
                members=[
                    DrawnMember(m, trajectory(max(step - m, 0), [7 + m, 8, 2]), Score(float(m))) for m in range(2)
                ],
            )
            for g in range(2)
        ]
        return Drawn(step=step, groups=groups, dropped_stale=1, failed=0)

    async def handle(self, request):
        match request:
            case Begin(epoch=epoch, at=at, cursor=cursor):
                self.epoch = epoch
                self.begun.append((at, cursor))
                return Begun(self.version)
            case Draw(epoch=epoch) | FinishStep(epoch=epoch) | Checkpointed(epoch=epoch) if epoch < self.epoch:
                raise AsyncRLError(f"trainer epoch {epoch} is older than {self.epoch}: a younger trainer took over")
            case GetCursor():
                return DataCursor(Cursor(self.version, 2 * self.version, 2 * self.version + 3, [], {"train.0": "x"}))
            case Checkpointed(version=version):
                self.checkpoints.append(version)
                return Done()
            case Draw(step=step) if step < self.batches:
                self.events.append(f"draw {step}")
                return self.batch(step)
            case Draw(wait_s=wait_s):
                if self.after == "ended":
                    return DataEnded("the data ended")
                await asyncio.sleep(min(wait_s, 0.1))
                return NotYet("group 9 is missing, held by rollout-0 for 3.2 s")
            case FinishStep(step=step):
                self.events.append(f"finish {step}")
                self.version = max(self.version, step + 1)
                return StepFinished(step + 1)
            case Evaluate(version=version):
                self.events.append(f"evaluate {version}")
                self.asked.add(version)
                return Done()
            case GetEvaluation(version=version) if version not in self.asked:
                raise AsyncRLError(f"no evaluation was asked for at version {version}")
            case GetEvaluation(version=version, wait_s=wait_s) if version not in self.polled:
                self.polled.add(version)
                await asyncio.sleep(min(wait_s, 0.1))
                return NotYet("3 of 4 samples are missing")
            case GetEvaluation(version=version):
                return report(version)
            case GetBuffer():
                return BufferReport(
                    version=4,
                    admitted=10,
                    held=0,
                    trained=8,
                    dropped={"stale": 1},
                    failed={"attempts": 1},
                    states={},
                    conserved=True,
                    lapsed=0,
                    tokens=120,
                    workers={
                        "rollout-0": WorkerStats(up_s=10.0, busy_s=7.5, tokens=120),
                        "reward-0": WorkerStats(up_s=10.0, busy_s=1.0),
                    },
                    worker_versions={"rollout-0": 4},
                    oldest_lease="",
                    ended=False,
                )
            case Close(reason=reason):
                self.events.append(f"close: {reason}")
                return Done()
            case _:
                raise AsyncRLError(f"the script has no answer to {request}")


def report(version):
    score = SourceScore(tasks=4, mean_reward=version / 10, truncated=0.0)
    return EvaluationReport(
        asked=version,
        version=version,
        restarted=0,
        samples=4,
        voting=4,
        mean_reward=version / 10,
        sources={"words": score},
    )


class Relay:
    """Makes every committed version visible but those in `refused`."""

    def __init__(self, events, folder, refused=()):
        self.events, self.folder, self.refused = events, folder, refused
        self.visible = []
        self.epoch = 0

    async def stop(self):
        return Done()

    async def handle(self, request):
        match request:
            case Fence(epoch=epoch):
                self.epoch = epoch
                return Done()
            case Offer(version=version) if version in self.refused:
                return Rejected("no room")
            case Offer(version=version, nbytes=nbytes):
                path = self.folder / f"slot-{version % 2}"
                path.write_bytes(bytes(nbytes))
                return Slot(str(path))
            case Commit(manifest=manifest):
                if manifest.version not in self.visible:
                    self.visible.append(manifest.version)
                    self.events.append(f"publish {manifest.version}")
                return Visible(manifest.version)
            case _:
                raise AsyncRLError(f"the script has no answer to {request}")


async def ring(config, buffer, relay, while_running=None):
    """Run the trainer's service among the scripted ones; returns when it has ended."""
    service = TrainerService(config, "trainer")
    service.run.create()
    run = run_id(service.run)

    async def of_relay(request):
        if isinstance(request, Stop):
            relay.events.append("stop weight_sync")
            return await relay.stop()
        return await relay.handle(request)

    first = Mailbox("", "buffer", BufferRequest, BufferReply, buffer.handle, run=run)
    second = Mailbox("", "weight_sync", WeightSyncRequest, WeightSyncReply, of_relay, run=run)
    async with asyncio.timeout(60), first, second:
        service.run.announce("buffer", first.address)
        service.run.announce("weight_sync", second.address)
        serving = [asyncio.create_task(mailbox.serve()) for mailbox in (first, second)]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(service.main())
                if while_running:
                    tasks.create_task(while_running(service))
        finally:
            for task in serving:
                task.cancel()
    return service


def run(config, buffer, relay, while_running=None):
    try:
        return asyncio.run(ring(config, buffer, relay, while_running))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


def metrics_of(service, kind):
    lines = [json.loads(line) for line in service.run.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_from_its_start_to_its_summary(tmp_path):
    events = []
    relay = Relay(events, tmp_path)
    service = run(configuration(tmp_path), Buffer(events), relay)
    assert events == [
        "publish 0",
        "evaluate 0",
        *["draw 0", "finish 0", "publish 1"],
        *["draw 1", "finish 1", "publish 2", "evaluate 2"],
        *["draw 2", "finish 2", "publish 3"],
        *["draw 3", "finish 3", "publish 4", "evaluate 4"],
        "close: max_steps",
        "stop weight_sync",
    ]
    assert service.version == 4

    steps, evaluations = metrics_of(service, "step"), metrics_of(service, "evaluation")
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert steps[2]["lag_histogram"] == {"0": 6, "1": 6}
    assert steps[2]["reward_mean"] == 0.5 and steps[2]["dropped_stale"] == 1
    assert [line["version"] for line in evaluations] == [0, 2, 4]

    summary = json.loads(service.run.summary.read_text())
    assert summary["format"] == 1 and summary["ended"] == "max_steps" and summary["steps"] == 4
    assert summary["held_out"] == {"before": 0.0, "after": 0.4, "curve": [[0, 0.0], [2, 0.2], [4, 0.4]]}
    assert summary["groups"]["admitted"] == 10 and summary["groups"]["conserved"] is True
    assert summary["tokens_trained"] == 48 and summary["tokens_generated"] == 120
    assert summary["idle_rollout"] == 0.25 and 0 <= summary["idle_trainer"] <= 1
    assert summary["largest_lag_trained"] == 1 and summary["failed_publications"] == 0

    folders = sorted(p.name for p in service.run.checkpoints.glob("step-*"))
    assert folders == ["step-00000003", "step-00000004"]
    assert summary["checkpoint"].endswith("step-00000004")
    AutoModelForCausalLM.from_pretrained(summary["checkpoint"])


def test_a_failed_publication_leaves_receivers_on_their_version_and_the_run_goes_on(tmp_path):
    """Field report 35, the trainer's part."""
    events = []
    relay = Relay(events, tmp_path, refused=(2,))
    service = run(configuration(tmp_path), Buffer(events), relay)
    assert relay.visible == [0, 1, 3, 4]
    assert events.index("finish 1") < events.index("draw 2")
    assert json.loads(service.run.summary.read_text())["failed_publications"] == 1


def test_a_batch_that_does_not_come_ends_the_run_and_says_what_is_missing(tmp_path):
    events = []
    config = configuration(tmp_path, trainer={"draw_wait_s": 0.5}, evaluation={"at_start": False})
    with pytest.raises(DeadlineExceeded) as raised:
        run(config, Buffer(events, batches=1), Relay(events, tmp_path))
    assert "the batch of step 1 (group 9 is missing, held by rollout-0 for 3.2 s)" in str(raised.value)
    assert "trainer.draw_wait_s = 0.5" in str(raised.value)


def test_the_run_ends_early_where_the_data_ends(tmp_path):
    events = []
    service = run(configuration(tmp_path), Buffer(events, batches=2, after="ended"), Relay(events, tmp_path))
    assert events[-5:] == ["finish 1", "publish 2", "evaluate 2", "close: the data ended", "stop weight_sync"]
    assert [line["version"] for line in metrics_of(service, "evaluation")] == [0, 2]
    summary = json.loads(service.run.summary.read_text())
    assert summary["steps"] == 2 and summary["ended"] == "the data ended"
    assert summary["held_out"]["after"] == 0.2


def test_an_evaluation_that_never_comes_does_not_hold_up_the_end(tmp_path):
    """Field report 12: to max_steps with an evaluation pending: a clean exit."""

    class Silent(Buffer):
        async def handle(self, request):
            if isinstance(request, GetEvaluation):
                await asyncio.sleep(request.wait_s)
                return NotYet("nobody holds version 0")
            return await super().handle(request)

    events = []
    config = configuration(tmp_path, evaluation={"wait_s": 0.5})
    service = run(config, Silent(events), Relay(events, tmp_path))
    assert events[-2:] == ["close: max_steps", "stop weight_sync"]
    assert json.loads(service.run.summary.read_text())["held_out"]["after"] is None


def test_a_relay_that_dies_at_the_very_end_makes_no_failure_of_the_run(tmp_path):
    class Dead(Relay):
        async def stop(self):
            await asyncio.sleep(60)

    events = []
    config = configuration(tmp_path, max_steps=1, services={"ask_s": 20, "connect_s": 20, "stop_s": 0.5})
    service = run(config, Buffer(events), Dead(events, tmp_path))
    assert events[-2:] == ["close: max_steps", "stop weight_sync"]
    assert json.loads(service.run.summary.read_text())["ended"] == "max_steps"


def test_an_ordered_stop_leaves_a_checkpoint_and_a_run_that_can_go_on(tmp_path):
    events = []

    async def stop_it(service):
        remote = service.remote("trainer", ControlRequest, ControlReply)
        async with remote:
            while True:
                status = await remote.ask(GetStatus())
                if "group 9 is missing" in str(status.detail.get("stage", "")):
                    break
                await asyncio.sleep(0.02)
            assert status.version == 1 and status.detail["step"] == 1 and status.detail["reward"] == 0.5
            await remote.ask(Stop("the user asked"))

    buffer = Buffer(events, batches=1)
    service = run(configuration(tmp_path), buffer, Relay(events, tmp_path), stop_it)
    assert not service.run.summary.exists()  # the run is not complete
    assert events[-1] == "publish 1"  # nobody was sent home
    assert [p.name for p in service.run.checkpoints.glob("step-*")] == ["step-00000001"]
    buffer.batches = 99
    run(configuration(tmp_path), buffer, Relay(events, tmp_path))
    assert json.loads(service.run.summary.read_text())["steps"] == 4
    assert [line["step"] for line in metrics_of(service, "step")] == [0, 1, 2, 3]


class Killed(Exception):
    pass


def kill_at(version, saved=0):
    """Once `version` is published, the checkpoint of `saved` is written, and the next batch is asked for."""

    async def watch(service):
        while service.version < version or not service.detail()["stage"].startswith("waiting for a draw"):
            await asyncio.sleep(0.01)
        while saved and not (service.run.checkpoints / f"step-{saved:08d}").exists():
            await asyncio.sleep(0.01)
        raise Killed

    return watch


def weights_of(service, version):
    state = service.run.checkpoints / f"step-{version:08d}" / "trainer" / "state.json"
    return json.loads(state.read_text())["weights"]


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_a_trainer_that_is_killed_makes_its_steps_again_bit_for_bit(tmp_path, every):
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    straight = run(configuration(undisturbed), Buffer([]), Relay([], undisturbed))

    config = configuration(disturbed, trainer={"learning_rate": 0.01, "checkpoint_every": every})
    events, buffer = [], Buffer([], batches=3)
    buffer.events = events
    saved = 3 // every * every if every else 0
    with pytest.raises(Killed):
        run(config, buffer, Relay(events, disturbed), kill_at(3, saved))
    events.clear()
    buffer.batches = 99
    service = run(config, buffer, Relay(events, disturbed))
    assert [at for at, _ in buffer.begun] == [0, saved]
    steps = [event for event in events if not event.startswith(("evaluate", "stop", "close"))]
    assert steps == [*[f"draw {step}" for step in range(saved, 3)], "publish 3", "draw 3", "finish 3", "publish 4"]
    if saved:
        assert buffer.begun[1][1] == Cursor(saved, 2 * saved, 2 * saved + 3, [], {"train.0": "x"})
    assert weights_of(service, 4) == weights_of(straight, 4)
    assert [line["step"] for line in metrics_of(service, "step")] == [0, 1, 2, 3]
    assert sorted(line["asked"] for line in metrics_of(service, "evaluation")) == [0, 2, 4]
    assert json.loads(service.run.summary.read_text())["steps"] == 4


def test_the_buffer_is_told_from_which_checkpoint_on_it_must_keep_the_draws(tmp_path):
    buffer = Buffer([])
    run(configuration(tmp_path), buffer, Relay([], tmp_path))
    assert buffer.checkpoints == [1, 1, 2, 3, 3]  # two are kept; the last is the one of the end, told again


def test_a_checkpoint_that_is_damaged_is_put_aside_and_the_one_before_it_taken(tmp_path, caplog):
    events, buffer = [], Buffer([], batches=3)
    buffer.events = events

    async def until_the_checkpoint_of_3(service):
        while len(buffer.checkpoints) < 3:
            await asyncio.sleep(0.01)
        raise Killed

    with pytest.raises(Killed):
        run(configuration(tmp_path), buffer, Relay(events, tmp_path), until_the_checkpoint_of_3)
    path = tmp_path / "runs" / "scripted" / "checkpoints" / "step-00000003" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    buffer.batches = 99
    service = run(configuration(tmp_path), buffer, Relay(events, tmp_path))
    assert [at for at, _ in buffer.begun] == [0, 2]
    assert "damaged-step-00000003 cannot be read, an older checkpoint is taken" in caplog.text
    assert json.loads(service.run.summary.read_text())["steps"] == 4


def test_other_settings_than_those_of_the_checkpoint_are_told(tmp_path):
    run(configuration(tmp_path), Buffer([]), Relay([], tmp_path))
    other = configuration(tmp_path, trainer={"learning_rate": 0.02})
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate = 0\.02, was 0\.01: a run that goes on keeps it"):
        run(other, Buffer([]), Relay([], tmp_path))


def test_an_old_trainer_that_wakes_up_can_commit_nothing(tmp_path):
    events, buffer = [], Buffer([])
    buffer.events = events

    async def another_takes_over(service):
        while "publish 2" not in events:
            await asyncio.sleep(0)
        buffer.epoch += 1

    with pytest.raises(PeerRefused, match="trainer epoch 1 is older than 2: a younger trainer took over"):
        run(configuration(tmp_path), buffer, Relay(events, tmp_path), another_takes_over)


def test_heartbeats_go_on_during_an_update(tmp_path, monkeypatch):
    import time

    from async_rl.services.trainer import work as module

    events, answered = [], []
    original = module.train_step

    def slow(*arguments):
        time.sleep(0.5)
        return original(*arguments)

    monkeypatch.setattr(module, "train_step", slow)

    async def watch(service):
        remote = service.remote("trainer", ControlRequest, ControlReply)
        async with remote:
            while not answered:
                status = await remote.ask(GetStatus())
                if status.detail["stage"] == "updating with the batch of step 0":
                    answered.append(status)
                await asyncio.sleep(0.02)

    run(configuration(tmp_path, max_steps=1), Buffer(events), Relay(events, tmp_path), watch)
    assert answered
