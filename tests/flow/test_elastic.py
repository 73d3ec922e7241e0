"""Workers join a run and leave it at any time: nothing else restarts, no bound breaks, no group is lost."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.flow import ring

pytestmark = pytest.mark.timeout(180)

SERVICES = ["trainer", "buffer", "weight-sync", "reward"]


class Fleet:
    """The services of a run but rollouts, and rollouts that come and go."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder, self.settings = folder, settings
        self.others = {name: self._serve(name) for name in SERVICES}
        self.workers: dict[int, subprocess.Popen[str]] = {}
        self.said = ""

    def _serve(self, *service: str) -> "subprocess.Popen[str]":
        name, *rest = service
        return ring.start("serve", name, "run.toml", *self.settings, *rest, cwd=self.folder)

    def join(self, index: int) -> None:
        self.workers[index] = self._serve("rollout", "--index", str(index))

    def leave(self, index: int, number: signal.Signals) -> int:
        worker = self.workers.pop(index)
        worker.send_signal(number)
        status, said = ring.finish(worker, timeout=30)
        self.said += said
        return status

    def finish(self) -> None:
        for process in [*self.others.values(), *self.workers.values()]:
            status, said = ring.finish(process)
            self.said += said
            assert status == 0, said

    def kill(self) -> None:
        for process in [*self.others.values(), *self.workers.values()]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def assert_whole(folder: Path, steps: int, bound: int) -> None:
    groups = ring.summary(folder)["groups"]
    gone = sum(groups["dropped"].values()) + sum(groups["failed"].values())
    assert groups["conserved"]
    assert groups["admitted"] == groups["trained"] + gone + groups["held"]
    drawn = [group for record in ring.steps(folder) for group in record["group_ids"]]
    assert len(drawn) == len(set(drawn)) == groups["trained"] == steps * 4
    assert max(int(lag) for record in ring.steps(folder) for lag in record["lag_histogram"]) <= bound


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_workers_join_leave_and_are_killed_at_random(faked: Path, mode: str) -> None:
    fleet, chance = Fleet(faked, f"mode={mode}", "max_steps=60"), random.Random(mode)
    try:
        fleet.join(0)
        joined = 1
        while fleet.others["trainer"].poll() is None:
            time.sleep(chance.uniform(0.1, 0.8))
            if len(fleet.workers) < 3:
                fleet.join(joined)  # a number that the run has never seen: rollout.workers is 1
                joined += 1
            elif not (faked / "runs/ring/summary.json").exists():
                number = chance.choice([signal.SIGTERM, signal.SIGKILL])
                status = fleet.leave(chance.choice(list(fleet.workers)), number)
                assert status in ((0, -number) if number == signal.SIGTERM else (-number,))  # or it had only begun
        for index in list(fleet.workers):
            fleet.leave(index, signal.SIGKILL)
        fleet.finish()
    finally:
        fleet.kill()
    assert joined > 3
    assert_whole(faked, 60, {"async": 2, "sync": 0}[mode])
    assert ring.left_over(faked) == []


def test_a_run_without_any_worker_waits_and_goes_on_with_the_next(faked: Path) -> None:
    fleet = Fleet(faked, "mode=async", "max_steps=40", "trainer.draw_wait_s=60", "services.lease_s=2")
    try:
        fleet.join(0)
        ring.until(lambda: len(ring.steps(faked)) >= 5, "step 5")
        assert fleet.leave(0, signal.SIGTERM) == 0
        time.sleep(1.0)
        before = len(ring.steps(faked))
        time.sleep(2.0)
        assert len(ring.steps(faked)) <= before + 2  # what was generated already
        stood = len(ring.steps(faked))
        assert stood < 40
        fleet.join(7)
        ring.until(lambda: len(ring.steps(faked)) > stood, "a step by the newcomer")
        assert fleet.leave(7, signal.SIGKILL) == -signal.SIGKILL
        fleet.join(8)
        fleet.finish()
    finally:
        fleet.kill()
    assert_whole(faked, 40, 2)
    (version,) = re.findall(r"rollout-7 begins with version (\d+)", fleet.said)
    assert int(version) == stood  # the newest, whatever it missed


def test_a_newcomer_joins_a_run_that_train_has_started(faked: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=40", cwd=faked)
    try:
        ring.until(lambda: len(ring.steps(faked)) >= 3, "step 3")
        newcomer = ring.start("serve", "rollout", "run.toml", "max_steps=40", "--index", "7", cwd=faked)
        ring.until(lambda: ring.pid_of(faked, "rollout-7"), "the newcomer")
    finally:
        status, output = ring.finish(process)
    assert status == 0, output
    assert "restarts              │ none" in output
    status, said = ring.finish(newcomer)
    assert status == 0, said
    assert_whole(faked, 40, 2)
    assert ring.left_over(faked) == []
