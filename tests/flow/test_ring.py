"""The whole ring: real processes, a real model, the command line as a user types it."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from async_rl.weights.slot import Slots
from tests.flow import ring

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def folder(warm: Path, tmp_path: Path) -> Path:
    target = tmp_path / "work"
    shutil.copytree(warm, target)
    return target


def assert_conserved(folder: Path, *, trained: int) -> None:
    groups = ring.summary(folder)["groups"]
    gone = sum(groups["dropped"].values()) + sum(groups["failed"].values())
    assert groups["conserved"]
    assert groups["admitted"] == groups["trained"] + gone + groups["held"]
    assert groups["trained"] == trained


def test_an_asynchronous_run_trains_and_leaves_everything_it_promises(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 0, output
    assert_conserved(folder, trained=16)
    summary = ring.summary(folder)
    assert summary["steps"] == 4
    assert summary["largest_lag_trained"] <= 2
    assert summary["held_out"]["before"] is not None
    assert summary["held_out"]["after"] is not None
    for label in (
        "held-out score",
        "idle",
        "lag of trained tokens",
        "mismatch KL",
        "tokens generated",
        "admitted",
    ):
        assert label in output
    run = folder / "runs" / "ring"
    assert {p.name for p in (run / "logs").iterdir()} == {
        "buffer.log", "weight_sync.log", "trainer.log", "rollout-0.log", "reward-0.log"
    }  # fmt: skip
    assert (run / "run.toml").is_file()
    assert list((run / "checkpoints").glob("step-*/model.safetensors"))
    assert ring.left_over(folder) == []
    assert list((run / "services").glob("*.json")) == []


@pytest.mark.parametrize("mode", ["sync", "one-step"])
def test_no_token_is_older_than_its_mode_says(folder: Path, mode: str) -> None:
    # Field report 3: at staleness 0 each trained token's version equals the trainer's.
    status, output = ring.run("train", "run.toml", f"mode={mode}", cwd=folder)
    assert status == 0, output
    assert_conserved(folder, trained=16)
    bound = {"sync": 0, "one-step": 1}[mode]
    lags = {int(lag) for record in ring.steps(folder) for lag in record["lag_histogram"]}
    assert lags
    assert max(lags) <= bound


def test_a_seeded_async_run_at_0_is_sample_identical_to_a_sync_run(folder: Path) -> None:
    # Field report 3: the same groups, rewards and tokens in every step.
    figures = ("group_ids", "reward_mean", "length_mean", "length_max", "truncated_share", "lag_histogram")
    runs = []
    for overrides in (["mode=sync"], ["mode=async", "staleness.max=0"]):
        status, output = ring.run("train", "run.toml", *overrides, cwd=folder)
        assert status == 0, output
        runs.append([[record[figure] for figure in figures] for record in ring.steps(folder)])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 4


def test_an_off_policy_run_trains_each_draw_several_times(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", "mode=off-policy", cwd=folder)
    assert status == 0, output
    assert_conserved(folder, trained=8)  # four steps, each draw trained twice
    assert ring.summary(folder)["largest_lag_trained"] <= 4


def test_workers_that_are_killed_cost_nothing_but_time(folder: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=30", cwd=folder)
    killed = []
    try:
        for service, step in (("rollout-0", 2), ("reward-0", 6), ("weight_sync", 9)):
            ring.until(lambda step=step: len(ring.steps(folder)) >= step, f"step {step}")
            pid = ring.until(lambda service=service: ring.pid_of(folder, service), service)
            os.kill(pid, signal.SIGKILL)
            killed.append(service)
    finally:
        status, output = ring.finish(process)
    assert status == 0, output
    assert killed == ["rollout-0", "reward-0", "weight_sync"]
    for service in killed:
        assert f"{service} ended (signal SIGKILL); starting it anew" in output
    assert_conserved(folder, trained=30 * 4)
    drawn = [group for record in ring.steps(folder) for group in record["group_ids"]]
    assert len(drawn) == len(set(drawn)) == 30 * 4  # none lost, none trained twice
    assert ring.left_over(folder) == []


def test_a_buffer_that_is_killed_goes_on_where_it_was(folder: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=30", cwd=folder)
    try:
        for step in (3, 9, 16):
            ring.until(lambda step=step: len(ring.steps(folder)) >= step, f"step {step}")
            os.kill(ring.until(lambda: ring.pid_of(folder, "buffer"), "buffer"), signal.SIGKILL)
            ring.until(lambda: ring.pid_of(folder, "buffer"), "the next buffer")
    finally:
        status, output = ring.finish(process)
    assert status == 0, output
    assert output.count("buffer ended (signal SIGKILL); starting it anew") == 3
    assert_conserved(folder, trained=30 * 4)
    drawn = [group for record in ring.steps(folder) for group in record["group_ids"]]
    assert len(drawn) == len(set(drawn)) == 30 * 4  # none lost, none trained twice
    assert ring.left_over(folder) == []


@pytest.mark.parametrize("service", ["trainer", "buffer"])
def test_without_a_journal_the_death_of_trainer_or_buffer_is_the_last_word(folder: Path, service: str) -> None:
    process = ring.start("train", "run.toml", "max_steps=500", "journal.enabled=false", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 2, "step 2")
    os.kill(ring.until(lambda: ring.pid_of(folder, service), service), signal.SIGKILL)
    status, output = ring.finish(process)
    assert status == 1
    assert output.rstrip().splitlines()[-1].startswith(f"async-rl: error: {service} ended (signal SIGKILL)")
    assert "Traceback" not in output
    assert ring.left_over(folder) == []


def test_a_journal_without_room_ends_the_run_with_its_setting(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", "max_steps=500", "journal.max_bytes=60000", cwd=folder)
    assert status in (1, 2)  # the trainer may be the first to tell it
    assert "journal.max_bytes = 60000" in output.rstrip().splitlines()[-1]
    assert "Traceback" not in output
    assert ring.left_over(folder) == []


def test_an_error_inside_a_service_ends_the_run_with_that_error(folder: Path) -> None:
    # Field report 8: a failure is never polled past for hours.
    (folder / "grading.py").write_text("def grade(task, trajectory):\n    return 1.0\n")
    status, output = ring.run("train", "run.toml", "reward.grader={kind='custom', function='grading:grad'}", cwd=folder)
    assert status == 2
    assert "grading" in output.rstrip().splitlines()[-1]
    assert "did you mean 'grade'" in output
    assert ring.left_over(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_and_can_be_run_again(folder: Path, number: signal.Signals) -> None:
    # Field report 54.
    process = ring.start("train", "run.toml", "max_steps=500", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 2, "step 2")
    process.send_signal(number)
    status, output = ring.finish(process, timeout=40)
    assert status == 130
    assert "Traceback" not in output
    assert ring.left_over(folder) == []
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 0, output
    assert "what an earlier run left is in" in output


def test_a_supervisor_that_is_killed_takes_its_services_along(folder: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=500", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 1, "step 1")
    process.kill()
    process.wait()
    ring.until(lambda: not ring.left_over(folder), "the end of every service", timeout=10)
    assert Slots("/dev/shm", folder / "runs" / "ring").remove() == 0  # what is in shared memory outlives processes


def test_five_services_by_hand_in_any_order_and_a_second_time_in_the_same_folder(folder: Path) -> None:
    names = ["buffer", "weight-sync", "trainer", "rollout", "reward"]
    for _ in range(2):
        random.Random(os.getpid()).shuffle(names)
        processes = {name: ring.start("serve", name, "run.toml", cwd=folder) for name in names}
        ends = {name: ring.finish(process) for name, process in processes.items()}
        assert {name: status for name, (status, _) in ends.items()} == dict.fromkeys(names, 0), ends
        assert_conserved(folder, trained=16)
        assert ring.left_over(folder) == []


def test_a_run_is_not_started_twice_at_once(folder: Path) -> None:
    first = ring.start("train", "run.toml", "max_steps=500", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 1, "step 1")
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 2
    assert "running already" in output
    before = len(ring.steps(folder))
    ring.until(lambda: len(ring.steps(folder)) > before, "another step of the first run")
    first.send_signal(signal.SIGINT)
    assert ring.finish(first)[0] == 130


def test_eval_scores_a_checkpoint_that_plain_transformers_loads(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 0, output
    checkpoint = ring.summary(folder)["checkpoint"]
    status, output = ring.run("eval", "run.toml", "--checkpoint", checkpoint, "--samples", "4", cwd=folder)
    assert status == 0, output
    assert "pass@4" in output
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / checkpoint)
    assert json.loads((folder / checkpoint / "config.json").read_text())["vocab_size"] == model.config.vocab_size
