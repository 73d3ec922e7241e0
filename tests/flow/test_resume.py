"""`train --resume`: whatever ended a run, it goes on as if nothing had been."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.flow import ring

pytestmark = pytest.mark.timeout(180)

STEPS = 40
SETTINGS = (f"max_steps={STEPS}", "trainer.checkpoint_every=3")


def started(folder: Path, *settings: str, steps: int = 5) -> "ring.subprocess.Popen[str]":
    """A run that has made some steps."""
    process = ring.start("train", "run.toml", *SETTINGS, *settings, cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= steps, f"step {steps}")
    return process


def killed(folder: Path, *settings: str) -> None:
    """A run of which everything was killed at once."""
    process = started(folder, *settings)
    process.kill()
    process.wait()
    ring.until(lambda: not ring.left_over(folder), "the end of every service", timeout=20)
    assert len(ring.steps(folder)) < STEPS


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def assert_whole(folder: Path, steps: int = STEPS) -> None:
    """Every step is there once, no group twice."""
    assert [record["step"] for record in ring.steps(folder)] == list(range(steps))
    drawn = [group for record in ring.steps(folder) for group in record["group_ids"]]
    assert len(drawn) == len(set(drawn)) == steps * 4
    groups = ring.summary(folder)["groups"]
    assert groups["conserved"]
    assert groups["trained"] == steps * 4


def resumed(folder: Path, *settings: str) -> str:
    """What a resumed run that came to its end printed."""
    status, output = ring.run("train", "run.toml", "--resume", *(settings or SETTINGS), cwd=folder)
    assert status == 0, output
    assert ring.left_over(folder) == []
    return output


def assert_replayed(folder: Path) -> None:
    """The weights are those that the journal gives again from the first step on."""
    status, output = ring.run("replay", "run.toml", cwd=folder)
    assert status == 0, output
    assert f"version {STEPS}: equal to" in output
    assert "versions 0 to" in output


def test_a_run_that_was_killed_as_a_whole_goes_on_and_ends_with_the_weights_of_its_replay(graded: Path) -> None:
    killed(graded)
    output = resumed(graded)
    assert "what an earlier run left" not in output
    assert_whole(graded)
    assert_replayed(graded)


def test_an_interrupted_run_goes_on_under_settings_that_may_change(graded: Path) -> None:
    process = started(graded)
    process.send_signal(signal.SIGINT)
    assert ring.finish(process)[0] == 130
    assert not (graded / "runs" / "ring" / "summary.json").exists()
    output = resumed(graded, *SETTINGS, "rollout.workers=2")
    assert "rollout.workers = 2, was 1" in output
    assert (graded / "runs" / "ring" / "logs" / "rollout-1.log").exists()
    assert_whole(graded)
    assert_replayed(graded)


def test_a_run_that_broke_goes_on_once_its_cause_is_mended(graded: Path) -> None:
    process = started(graded, "services.max_failures=2")
    (graded / "abstain").touch()
    status, output = ring.finish(process)
    assert status == 1
    assert "failed in a row" in last_line(output)
    (graded / "abstain").unlink()
    resumed(graded)
    assert_whole(graded)


def test_a_run_whose_journal_was_full_goes_on_with_more_room(graded: Path) -> None:
    status, output = ring.run("train", "run.toml", *SETTINGS, "journal.max_bytes=150000", cwd=graded)
    assert status in (1, 2)
    assert "journal.max_bytes = 150000" in last_line(output)
    output = resumed(graded, *SETTINGS, "journal.max_bytes=100000000")
    assert "journal.max_bytes = 100000000, was 150000" in output
    assert_whole(graded)


def test_without_its_journal_a_run_goes_on_from_its_newest_checkpoint(graded: Path) -> None:
    killed(graded)
    shutil.rmtree(graded / "runs" / "ring" / "journal")
    resumed(graded)
    assert [record["step"] for record in ring.steps(graded)] == list(range(STEPS))
    assert ring.summary(graded)["groups"]["trained"] == STEPS * 4


def test_a_complete_run_goes_on_with_more_steps_and_else_says_how(graded: Path) -> None:
    status, output = ring.run("train", "run.toml", cwd=graded)
    assert status == 0, output
    status, output = ring.run("train", "run.toml", "--resume", cwd=graded)
    assert status == 2
    assert "all its 4 steps" in last_line(output)
    assert "max_steps" in last_line(output)
    output = resumed(graded, "max_steps=7")
    assert "max_steps = 7, was 4" in output
    before = json.loads((graded / "runs" / "ring" / "previous" / "1" / "summary.json").read_text())
    assert before["steps"] == 4
    assert ring.summary(graded)["steps"] == 7
    assert_whole(graded, 7)


def test_a_run_that_is_not_there_is_told_and_none_is_made(graded: Path) -> None:
    status, output = ring.run("train", "run.toml", "--resume", cwd=graded)
    assert status == 2
    assert "no run to go on with" in last_line(output)
    assert not (graded / "runs").exists()


def test_what_would_make_it_another_run_is_refused_in_one_line(graded: Path) -> None:
    killed(graded)
    for change in ("sampling.temperature=0.5", "algorithm.loss.clip_low=0.1", "batch.groups=2"):
        status, output = ring.run("train", "run.toml", "--resume", *SETTINGS, change, cwd=graded)
        assert status == 2
        assert change.partition("=")[0] in last_line(output)
        assert "model.path" in last_line(output)
    rows = (graded / "train.jsonl").read_text().splitlines()
    (graded / "train.jsonl").write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    status, output = ring.run("train", "run.toml", "--resume", *SETTINGS, cwd=graded)
    assert status == 2, output
    assert "train.0 changed" in last_line(output)
    assert "Traceback" not in output


def test_a_run_that_is_begun_anew_over_an_unfinished_one_says_what_would_have_gone_on(graded: Path) -> None:
    killed(graded)
    status, output = ring.run("train", "run.toml", cwd=graded)
    assert status == 0, output
    assert "what an earlier run left is in runs/ring/previous/1" in output
    assert "--resume" in output
    assert list((graded / "runs" / "ring" / "previous" / "1" / "journal").glob("*.log"))
    assert_whole(graded, 4)
    status, output = ring.run("train", "run.toml", cwd=graded)
    assert status == 0, output
    assert "what an earlier run left is in runs/ring/previous/2" in output
    assert "--resume" not in output


def test_by_hand_an_unfinished_run_goes_on(graded: Path) -> None:
    services = ("buffer", "weight-sync", "trainer", "rollout", "reward")
    processes = [ring.start("serve", name, "run.toml", *SETTINGS, cwd=graded) for name in services]
    ring.until(lambda: len(ring.steps(graded)) >= 5, "step 5")
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(ring.steps(graded)) < STEPS
    processes = [ring.start("serve", name, "run.toml", *SETTINGS, cwd=graded) for name in services]
    ends = {name: ring.finish(process) for name, process in zip(services, processes, strict=True)}
    assert {name: status for name, (status, _) in ends.items()} == dict.fromkeys(services, 0), ends
    assert not (graded / "runs" / "ring" / "previous").exists()
    assert_whole(graded)
    assert_replayed(graded)
