"""SIGKILL in the middle of publications, twenty times each, at moments spread over one."""

import asyncio
import time

import pytest

from tests.flow import weights_material
from tests.flow.actor_material import run
from tests.flow.weights_material import Nest, equal, fetched, kill, net

TIMES = 20
ABOUT = {"width": 256}
OPTIONS = (
    "weight_sync.operation_s=0.5",
    "weight_sync.publish_s=10",
    "weight_sync.bucket_bytes=20000",
    "weight_sync.relays=2",
)
FIRST, SECOND = "weight_sync-0", "weight_sync-1"


async def duration(trainer, version):
    """Of an undisturbed publication, which must be the second: groups and maps are there."""
    began = time.monotonic()
    assert await trainer.publish(version, seed=version, **ABOUT) == ""
    return time.monotonic() - began


async def shows(nest, name, version):
    return await weights_material.shows(nest, name, version, seed=version, **ABOUT)


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
def test_a_relay_killed_in_the_middle_costs_the_others_nothing_and_comes_back(nursery, tmp_path, transport):
    async def main():
        with Nest(nursery, tmp_path, *OPTIONS, f"weight_sync.transport={transport}") as nest:
            await nest.relay(FIRST)
            victim = await nest.relay(SECOND)
            trainer = nest.trainer(1, 2)
            assert await trainer.publish(0, seed=0, **ABOUT) == ""
            whole_s = await duration(trainer, 1)
            version, met = 1, 0
            for k in range(TIMES):
                version += 1
                told = trainer.tell(version, seed=version, **ABOUT)
                await asyncio.sleep(1.2 * whole_s * k / TIMES)
                kill(victim)
                if await fetched(nest.config, FIRST, have=version - 1, wait_s=0.0) is None:
                    met += 1
                victim = await nest.relay(SECOND)
                error = await trainer.wait(told)
                assert await shows(nest, FIRST, version), (k, error)
                if not error:
                    # adopted, served again, or lost after it was visible: never anything else
                    now = await fetched(nest.config, SECOND, wait_s=0.0)
                    assert now is None or (now[0] == version and equal(now[1], net(version, **ABOUT)))
                version += 1
                assert await trainer.publish(version, seed=version, **ABOUT) == "", (k, error)
                assert await shows(nest, FIRST, version)
                assert await shows(nest, SECOND, version)
            assert met >= TIMES // 4  # that many died before the publication was over

    run(main(), 110)


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
def test_a_rollout_killed_in_the_middle_is_noticed_by_nobody(nursery, tmp_path, transport):
    async def main():
        with Nest(nursery, tmp_path, *OPTIONS, f"weight_sync.transport={transport}") as nest:
            await nest.relay(FIRST)
            await nest.relay(SECOND)
            trainer = nest.trainer(1, 2)
            assert await trainer.publish(0, seed=0, **ABOUT) == ""
            whole_s = await duration(trainer, 1)
            version = 1
            for k in range(TIMES):
                reader = nest.fork(kind="reader", name=FIRST, worker=f"rollout-{k % 2}")
                for _ in range(2):
                    version += 1
                    told = trainer.tell(version, seed=version, **ABOUT)
                    await asyncio.sleep(1.5 * whole_s * k / TIMES)
                    kill(reader)
                    assert await trainer.wait(told) == ""
                assert await shows(nest, FIRST, version)
                assert await shows(nest, SECOND, version)

    run(main(), 110)


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
def test_a_rank_of_the_trainer_killed_in_the_middle_leaves_whole_versions_and_the_next_trainer_publishes(
    nursery, tmp_path, transport
):
    async def main():
        with Nest(nursery, tmp_path, *OPTIONS, f"weight_sync.transport={transport}") as nest:
            await nest.relay(FIRST)
            await nest.relay(SECOND)
            trainer = nest.trainer(1, 2)
            assert await trainer.publish(0, seed=0, **ABOUT) == ""
            whole_s = await duration(trainer, 1)
            version, met = 1, 0
            for k in range(TIMES):
                trainer.tell(version + 1, seed=version + 1, **ABOUT)
                await asyncio.sleep(1.2 * whole_s * k / TIMES)
                kill(trainer.pids[k % 2])
                await asyncio.sleep(0.02)
                trainer.kill()
                for name in (FIRST, SECOND):
                    found, tensors = await fetched(nest.config, name)
                    met += found == version
                    assert found in (version, version + 1)
                    assert equal(tensors, net(found, **ABOUT))
                version += 2
                trainer = nest.trainer(2 + k, 2)
                assert await trainer.publish(version, seed=version, **ABOUT) == ""
                assert await shows(nest, FIRST, version)
                assert await shows(nest, SECOND, version)
            assert met >= TIMES // 2  # of both relays together

    run(main(), 110)
