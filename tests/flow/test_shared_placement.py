"""placement = "shared": trainer and engines take turns on one device, and nothing else of the run changes."""

import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.flow import ring

pytestmark = pytest.mark.timeout(180)

SLOW = """
import time
from async_rl.services.trainer.step import learn


def step(batch, roles):
    time.sleep(0.4)
    return learn(batch, roles)
"""


class Stay(NamedTuple):
    who: str
    began: datetime
    ended: datetime


def events(folder: Path, who: str) -> list[tuple[datetime, str]]:
    """(time, "takes" or "leaves") of a service, as its log has them."""
    lines = (folder / "runs" / "ring" / "logs" / f"{who}.log").read_text().splitlines()
    parted = [line.split() for line in lines if line.endswith((f"{who} takes cpu", f"{who} leaves cpu"))]
    return [(datetime.fromisoformat(f"{day}T{time.replace(',', '.')}"), does) for day, time, _, _, does, _ in parted]


def stays(folder: Path, who: str, killed: datetime | None = None) -> Iterator[Stay]:
    """When it had the device. killed: the end of a stay that its log does not end."""
    since = None
    for at, does in events(folder, who):
        if does == "takes":
            if since is not None:
                assert killed is not None
                yield Stay(who, since, killed)
            since = at
        else:
            assert since is not None
            yield Stay(who, since, at)
            since = None
    if since is not None:  # the run has ended meanwhile
        yield Stay(who, since, datetime.max)


def assert_alternate(folder: Path, workers: int = 1, killed: datetime | None = None) -> int:
    """Trainer and engines never had the device at the same time; how often the trainer had it."""
    trainer = list(stays(folder, "trainer", killed))
    engines = [stay for n in range(workers) for stay in stays(folder, f"rollout-{n}", killed)]
    assert engines
    for mine in trainer:
        for theirs in engines:
            assert mine.ended <= theirs.began or theirs.ended <= mine.began, (mine, theirs)
    return len(trainer)


def has_device(folder: Path, who: str) -> int | None:
    """The pid of the service, stopped while it has the device."""
    pid = ring.pid_of(folder, who)
    if pid is None or (events(folder, who) or [(None, "leaves")])[-1][1] != "takes":
        return None
    os.kill(pid, signal.SIGSTOP)
    if events(folder, who)[-1][1] == "takes":
        return pid
    os.kill(pid, signal.SIGCONT)
    return None


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / "ring" / "checkpoints" / "step-00000006" / "model.safetensors")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("run", ["graded", "faked"])
def test_sharing_a_device_changes_no_sample_and_no_weight(
    run: str, workers: int, request: pytest.FixtureRequest
) -> None:
    graded: Path = request.getfixturevalue(run)
    settings = ["mode=sync", "max_steps=6", "evaluation.every=2", f"rollout.workers={workers}"]
    figures = ("group_ids", "reward_mean", "length_mean", "truncated_share", "lag_histogram")
    made = []
    for placement in ("apart", "shared"):
        status, output = ring.run("train", "run.toml", *settings, f"placement={placement}", cwd=graded)
        assert status == 0, output
        steps = [[record[figure] for figure in figures] for record in ring.steps(graded)]
        made.append((steps, ring.summary(graded)["held_out"], weights(graded)))
    assert made[0][:2] == made[1][:2]
    for name, tensor in made[0][2].items():
        # Which requests share a forward pass decides the last bits of a log-probability of transformers.
        torch.testing.assert_close(made[1][2][name], tensor, rtol=0, atol=0 if run == "faked" else 1e-3)
    assert ring.summary(graded)["largest_lag_trained"] == 0
    assert assert_alternate(graded, workers) == 1 + 6  # the load, and each step
    assert len(made[1][1]["curve"]) == 4
    assert ring.left_over(graded) == []


def test_without_lag_by_async_mode_it_may_be_shared_too(graded: Path) -> None:
    settings = ["mode=async", "staleness.max=0", "placement=shared"]
    status, output = ring.run("train", "run.toml", *settings, cwd=graded)
    assert status == 0, output
    assert assert_alternate(graded) == 1 + 4


@pytest.mark.parametrize("who", ["rollout-0", "trainer"])
def test_who_is_killed_with_the_device_has_given_it_back(graded: Path, who: str) -> None:
    (graded / "slow.py").write_text(SLOW)
    settings = ["mode=sync", "max_steps=6", "placement=shared", "algorithm.step=slow:step", "evaluation.every=2"]
    settings += ["trainer.checkpoint_every=2", "trainer.draw_wait_s=60"]
    process = ring.start("train", "run.toml", *settings, cwd=graded)
    killed = None
    try:
        ring.until(lambda: len(ring.steps(graded)) >= 3, "step 3")
        pid = ring.until(lambda: has_device(graded, who), f"{who} on the device")
        killed = datetime.now()
        os.kill(pid, signal.SIGKILL)
    finally:
        status, output = ring.finish(process)
    assert status == 0, output
    assert f"{who} ended (signal SIGKILL); starting it anew" in output
    groups = ring.summary(graded)["groups"]
    assert groups["conserved"]
    assert groups["trained"] == 6 * 4
    assert_alternate(graded, killed=killed)
    assert ring.left_over(graded) == []


def test_who_waits_too_long_names_the_holder_and_the_setting(graded: Path) -> None:
    settings = ["mode=sync", "max_steps=500", "placement=shared", "trainer.draw_wait_s=10"]
    process = ring.start("train", "run.toml", *settings, cwd=graded)
    try:
        ring.until(lambda: len(ring.steps(graded)) >= 2, "step 2")
        pid = ring.until(lambda: has_device(graded, "rollout-0"), "a worker that hangs with the device")
        os.kill(ring.until(lambda: ring.pid_of(graded, "trainer"), "the trainer"), signal.SIGKILL)
        ring.until(lambda: process.poll() is not None, "the end", timeout=60)
    finally:
        status, output = ring.finish(process)
    assert status == 1
    assert f"the device cpu, held by rollout-0 (pid {pid})" in output.rstrip().splitlines()[-1]
    assert "(trainer.draw_wait_s = 10)" in output.rstrip().splitlines()[-1]
    assert ring.left_over(graded) == []


def test_async_is_refused_in_one_line(graded: Path) -> None:
    for command in ("check", "train"):
        status, output = ring.run(command, "run.toml", "placement=shared", cwd=graded)
        assert status == 2
        assert output.strip().splitlines() == [output.strip()]
        assert "placement = 'shared': mode 'async' (staleness.max = 2)" in output
        assert "use mode 'sync'" in output
