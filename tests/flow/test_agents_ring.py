"""Episodes in a whole ring: real processes, a tool in a process of its own, a worker that is killed, a replay."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.flow import ring

pytestmark = pytest.mark.timeout(180)

EPISODE = """
import time

from async_rl.agents.llm import Call


def nap(seconds: float) -> str:
    "Sleeps."
    time.sleep(seconds)
    return "=a"


async def episode(task, llm):
    ids = llm.encode(task.prompt + "=")
    first = await llm.generate(ids, max_new_tokens=3)
    (answer,) = await llm.run([Call("c00000000", "nap", {"seconds": 0.02}, "")], [llm.tool(nap)])
    second = await llm.generate(ids + first.tokens + llm.encode(answer["content"]), max_new_tokens=3)
    if task.index % 3 == 0:  # and once more from the first point: a branch
        await llm.generate(ids + llm.encode("b"), max_new_tokens=2)
    return llm.decode(first.tokens + second.tokens).count("a") / 6
"""
SETTINGS = """
[environment]
max_turns = 3
run = { kind = "episode", function = "my_episode:episode" }

[reward]
grader = { kind = "episode" }
"""


@pytest.fixture
def folder(warm: Path, tmp_path: Path) -> Path:
    target = tmp_path / "work"
    shutil.copytree(warm, target)
    (target / "my_episode.py").write_text(EPISODE)
    (target / "run.toml").write_text((target / "run.toml").read_text() + SETTINGS)
    return target


def test_episodes_are_trained_and_trained_again_alike(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", "max_steps=8", cwd=folder)
    assert status == 0, output
    steps = ring.steps(folder)
    assert len(steps) == 8
    for step in steps:
        assert 2 <= step["turns_mean"] <= 3 and set(step["tools"]) == {"ok"}
        assert step["tools"]["ok"] == step["members"]
        assert step["lag_max"] <= 2
    assert sum(step["gradient_norm"] > 0 for step in steps) >= 6
    fresh = [step["mismatch_by_lag"]["0"][1] for step in steps if "0" in step["mismatch_by_lag"]]
    assert max(fresh) < 1e-8  # what the sampler saw is what the trainer reads, over turns and branches
    assert ring.summary(folder)["groups"]["conserved"]
    assert ring.left_over(folder) == []
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 0 and "equal at version 8" in output, output
    status, output = ring.run("buffer", "runs/ring", "--group", "3", cwd=folder)
    assert status == 0 and "turns" in output
    status, output = ring.run("eval", "run.toml", cwd=folder)
    assert status == 0 and "held_out" in output, output


def test_a_worker_that_is_killed_leaves_no_tool_and_the_run_goes_on(folder: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=10", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 2, "two steps")
    pid = ring.pid_of(folder, "rollout-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    status, output = ring.finish(process)
    assert status == 0, output
    assert "starting it anew" in output and len(ring.steps(folder)) == 10
    assert ring.summary(folder)["groups"]["conserved"]
    ring.until(lambda: not ring.left_over(folder), "the end of every process of the run", 20)


def test_an_episode_that_always_raises_ends_the_run_with_its_reason(folder: Path) -> None:
    (folder / "my_episode.py").write_text("async def episode(task, llm):\n    raise ConnectionError('no sandbox')\n")
    status, output = ring.run("train", "run.toml", "services.max_failures=2", cwd=folder)
    assert status != 0
    assert "Traceback" not in output and "no sandbox" in output, output
    assert ring.left_over(folder) == []
