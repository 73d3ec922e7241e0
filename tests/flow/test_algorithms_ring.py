"""Algorithms that need more than the policy, in a whole ring: their replay from the journal gives the same weights,
and so does a run whose trainer was killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.flow import ring

PRESETS = Path(__file__).parents[2] / "recipes" / "algorithms"
OWN = Path(__file__).parents[2] / "recipes" / "own" / "distil.py"

GRADER = """
def grade(task, trajectory):
    return sum(a == b for a, b in zip(trajectory.text, task.answer)) / len(task.answer)
"""
GRADED = "reward.grader={kind='custom', function='grading:grade'}"  # so that hardly a group is of equal rewards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ring.make_run(tmp_path)
    (tmp_path / "grading.py").write_text(GRADER)
    return tmp_path


@pytest.mark.parametrize("preset", ["remax", "prime", "dapo"])
def test_a_preset_laid_over_a_run_trains_and_is_replayed(folder: Path, preset: str) -> None:
    settings = (str(PRESETS / f"{preset}.toml"), "max_steps=6", GRADED, "sampling.max_new_tokens=8")
    status, output = ring.run("train", "run.toml", *settings, cwd=folder)
    assert status == 0, output
    summary = ring.summary(folder)
    assert summary["groups"]["conserved"] and summary["steps"] == 6
    assert sum(record["gradient_norm"] > 0 for record in ring.steps(folder)) >= 3
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 0, output
    assert "version 6" in output and "equal" in output


def test_a_trainer_with_a_critic_that_is_killed_makes_the_same_steps_again(folder: Path) -> None:
    settings = ("max_steps=14", "trainer.checkpoint_every=4", "services.max_failures=50", GRADED)
    process = ring.start("train", "run.toml", str(PRESETS / "ppo.toml"), *settings, cwd=folder)
    try:
        for step in (3, 6, 9):
            ring.until(lambda step=step: len(ring.steps(folder)) >= step, f"step {step}")
            pid = ring.until(lambda: ring.pid_of(folder, "trainer"), "the trainer")
            os.kill(pid, signal.SIGKILL)
    finally:
        status, output = ring.finish(process, timeout=200)
    assert status == 0, output
    assert len(ring.steps(folder)) == 14
    others = [record["others"] for record in ring.steps(folder)]
    assert all("value_loss" in figures for figures in others)
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 0, output
    assert "version 14" in output and "equal" in output


def test_a_dataflow_of_ones_own_mixes_a_teacher_with_grpo(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", GRADED, cwd=folder)
    assert status == 0, output
    teacher = sorted((folder / "runs" / "ring" / "checkpoints").glob("step-*"))[-1]
    (folder / "own.py").write_text(OWN.read_text())
    status, output = ring.run(
        "train",
        "run.toml",
        GRADED,
        "name=distilled",
        "algorithm.step=own:step",
        f"algorithm.teacher={{path='{teacher}', weight=0}}",
        cwd=folder,
    )
    assert status == 0, output
    lines = (folder / "runs" / "distilled" / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["kind"] == "step"]
    assert len(steps) == 4 and all("teacher_gap" in record["others"] for record in steps)


def test_what_cannot_be_a_step_is_refused_before_anything_starts(folder: Path) -> None:
    status, output = ring.run("check", "run.toml", "algorithm.step=own:step", cwd=folder)
    assert status == 2 and "algorithm.step = 'own:step': no module 'own'" in output
    status, output = ring.run("check", "run.toml", "algorithm.advantage={kind='gdpo', weights={}}", cwd=folder)
    assert status == 2 and "algorithm.advantage.weights is empty" in output
    status, output = ring.run("check", "run.toml", "algorithm.loss={kind='ppo', tau=1}", cwd=folder)
    assert status == 2 and "unknown key 'algorithm.loss.tau'" in output and "Traceback" not in output
