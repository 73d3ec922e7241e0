"""The lock on a shared device: many engines or one trainer, given back by whoever dies."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from async_rl.device_lock import DeviceLock
from async_rl.errors import DeadlineExceeded
from async_rl.rundir import RunDir
from tests.unit.trainer_material import configuration


@pytest.fixture
def lock(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    return lambda device="cpu": DeviceLock(configuration(trainer={"device": device}), run)


def test_engines_share_it_and_the_trainer_has_it_alone(lock):
    first, second, trainer = lock(), lock(), lock()
    assert first.try_take(alone=False)
    assert second.try_take(alone=False)
    assert not trainer.try_take(alone=True)
    first.release()
    assert not trainer.try_take(alone=True)
    second.release()
    assert trainer.try_take(alone=True)
    assert not first.try_take(alone=False)
    trainer.release()
    assert first.try_take(alone=False)


def test_each_device_has_its_own_and_cuda_is_its_first(lock):
    assert lock("cuda").try_take(alone=True)
    assert not lock("cuda:0").try_take(alone=False)
    assert lock("cuda:1").try_take(alone=True)
    assert lock("cpu").try_take(alone=True)


HOLD = """
import sys, time
from pathlib import Path
from async_rl.device_lock import DeviceLock
from async_rl.rundir import RunDir
from tests.unit.trainer_material import configuration
run = RunDir(Path(sys.argv[1]))
run.announce("rollout-3", "tcp://127.0.0.1:1")
lock = DeviceLock(configuration(trainer={"device": "cpu"}), run)
assert lock.try_take(alone=False)
print("held", flush=True)
time.sleep(60)
"""


def test_a_wait_names_its_holder_and_its_setting_and_ends_when_the_holder_is_killed(lock, tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        trainer = lock()

        def take(deadline_s):
            return asyncio.run(trainer.take(alone=True, deadline_s=deadline_s, setting="trainer.draw_wait_s"))

        with pytest.raises(DeadlineExceeded) as error:
            take(0.1)
        held = f"the device cpu, held by rollout-3 (pid {holder.pid}),"
        assert str(error.value) == f"{held} did not come within 0.1 s (trainer.draw_wait_s = 0.1)"
        os.kill(holder.pid, signal.SIGKILL)
        assert take(20)
    finally:
        holder.kill()
        holder.wait()


def test_who_does_not_want_it_any_more_stops_waiting(lock):
    trainer, engine = lock(), lock()
    assert trainer.try_take(alone=True)
    wanted = iter([True, True, False])
    taking = engine.take(alone=False, deadline_s=20, setting="services.lease_max_s", wanted=lambda: next(wanted))
    assert not asyncio.run(taking)
    assert not engine.held
