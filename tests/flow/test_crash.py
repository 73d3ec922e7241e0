"""Services are killed at random, over and over, in one run: nothing is lost, nothing is trained twice, and the
weights are those that the journal gives again."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from async_rl.buffers import events
from async_rl.buffers.journal.archive import Archive
from tests.flow import ring

KILLS = 30
STEPS = 150
SERVICES = ("buffer", "weight_sync", "trainer", "rollout-0", "rollout-1", "reward-0")
GRADER = """
def grade(task, trajectory):
    said, wanted = trajectory.text, task.answer
    return sum(a == b for a, b in zip(said, wanted)) / len(wanted)
"""
SETTINGS = (
    "reward.grader={kind='custom', function='grading:grade'}",
    f"max_steps={STEPS}",
    "rollout.workers=2",
    "trainer.checkpoint_every=7",
    "evaluation.every=20",
    "services.max_failures=1000",
    "journal.segment_bytes=200000",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ring.make_run(tmp_path)
    (tmp_path / "grading.py").write_text(GRADER)
    status, output = ring.run("warmup", "run.toml", cwd=tmp_path)
    assert status == 0, output
    return tmp_path


def test_whatever_is_killed_whenever_the_run_ends_as_if_nothing_had_been(folder: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    killed = _kill_at_random(folder, random.Random(seed))
    assert killed.total() >= KILLS
    assert set(killed) == set(SERVICES)

    summary = ring.summary(folder)
    groups = summary["groups"]
    assert groups["conserved"]
    assert groups["trained"] == STEPS * 4
    assert summary["steps"] == STEPS
    assert summary["largest_lag_trained"] <= 2
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert len({record["gradient_norm"] for record in ring.steps(folder)}) > STEPS / 2  # it did learn
    drawn = [group for record in ring.steps(folder) for group in record["group_ids"]]
    assert len(drawn) == len(set(drawn)) == STEPS * 4
    _require_whole(folder / "runs" / "ring" / "journal")

    status, output = ring.run("replay", "runs/ring", cwd=folder, timeout=300)
    assert status == 0, output
    assert f"version {STEPS}" in output and "equal" in output
    assert ring.left_over(folder) == []


def _kill_at_random(folder: Path, dice: random.Random) -> "Counter[str]":
    """How often each service was killed while the run went on to its end."""
    killed: Counter[str] = Counter()
    process = ring.start("train", "run.toml", *SETTINGS, cwd=folder)
    try:
        ring.until(lambda: ring.steps(folder), "the first step")
        while killed.total() < KILLS or min(killed[service] for service in SERVICES) < 3:
            time.sleep(dice.uniform(0.0, 1.0))
            assert process.poll() is None, f"the run was over after {killed.total()} kills:\n{process.communicate()[0]}"
            service = dice.choice(SERVICES)
            pid = ring.pid_of(folder, service)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed[service] += 1
        print(f"{killed.total()} kills by step {len(ring.steps(folder))}")
    finally:
        status, output = ring.finish(process, timeout=400)
    assert status == 0, output
    assert "Traceback" not in output
    return killed


def _require_whole(journal: Path) -> None:
    """Every acknowledged trajectory is there, and no group is in two draws."""
    archive = Archive(journal)
    happened = [event for _, event in archive.events()]
    members = [event.outline.place for event in happened if isinstance(event, events.Generated)]
    assert len(members) >= STEPS * 4 * 4
    assert all(archive.get(place).problems() is None for place in members)
    draws = [archive.get_draw(place) for place in archive.draws().values()]
    assert [draw.step for draw in draws] == list(range(STEPS))
    numbers = Counter(group.group for draw in draws for group in draw.groups)
    assert set(numbers.values()) == {1}
