"""Publications of one and two ranks to one and two relays, over every transport, bit for bit."""

import itertools
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.flow.actor_material import run
from tests.flow.weights_material import Nest, equal, fetched, kill, net, shows

QUICK = ("weight_sync.operation_s=2", "weight_sync.publish_s=15", "weight_sync.bucket_bytes=20000")


def options(transport, relays=1, *more):
    return (*QUICK, f"weight_sync.transport={transport}", f"weight_sync.relays={relays}", *more)


def names(relays):
    return ["weight_sync"] if relays == 1 else [f"weight_sync-{k}" for k in range(relays)]


async def assert_shown(nest, version, relays=2, **about):
    """Every relay shows `version`, and it is the trainer's model."""
    for name in names(relays):
        assert await shows(nest, name, version, **about), name


def left_on_disk(nest):
    return sorted((nest.run.path / "weights").iterdir())


@pytest.mark.parametrize(
    ("transport", "ranks", "relays"), list(itertools.product(["shm", "collective", "disk"], [1, 2], [1, 2]))
)
def test_what_arrives_is_the_trainers_model_bit_for_bit(nursery, tmp_path, transport, ranks, relays):
    # field reports 28, 29, 36: every name, tied and untied; 35: the version is the publication's
    async def main():
        with Nest(nursery, tmp_path, *options(transport, relays)) as nest:
            for name in names(relays):
                await nest.relay(name)
            trainer = nest.trainer(1, ranks)
            for version in range(3):
                assert await trainer.publish(version, seed=version) == ""
                await assert_shown(nest, version, relays, seed=version)

    run(main())


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
def test_a_head_of_its_own_and_another_dtype_than_the_trainers(nursery, tmp_path, transport):
    # field report 29
    async def main():
        with Nest(nursery, tmp_path, *options(transport)) as nest:
            await nest.relay()
            trainer = nest.trainer(1, 2)
            for version in range(2):
                assert await trainer.publish(version, seed=version, tied=False, dtype="bfloat16") == ""
                _, tensors = await fetched(nest.config, "weight_sync")
                assert equal(tensors, net(version, tied=False), torch.bfloat16)

    run(main())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_between_full_publications_only_what_changed_goes_and_the_whole_is_right(nursery, tmp_path, transport, ranks):
    async def main():
        with Nest(nursery, tmp_path, *options(transport, 2, "weight_sync.full_every=3")) as nest:
            for name in names(2):
                await nest.relay(name)
            trainer = nest.trainer(1, ranks)
            for version in range(7):
                about = {"seed": 0, "touched": version}
                assert await trainer.publish(version, **about) == ""
                await assert_shown(nest, version, **about)
                if transport == "disk":
                    found = left_on_disk(nest)
                    assert len(found) == ranks  # of each rank the newest
                    kind = "full" if version % 3 == 0 else "delta"
                    assert all(path.name.startswith(f"{kind}-000001-{version:08d}") for path in found)
                    nbytes = sum(path.stat().st_size for path in found)
                    assert (nbytes < 20_000) == (kind == "delta")

    run(main())


def test_a_relay_without_the_base_of_a_delta_gets_all_of_it(nursery, tmp_path):
    async def main():
        with Nest(nursery, tmp_path, *options("collective", 2, "weight_sync.full_every=100")) as nest:
            pids = [await nest.relay(name) for name in names(2)]
            trainer = nest.trainer(1, 2)
            for version in range(2):
                assert await trainer.publish(version, seed=0, touched=version) == ""
            kill(pids[1])
            await nest.relay("weight_sync-1")
            assert await trainer.publish(2, seed=0, touched=2) == ""
            await assert_shown(nest, 2, seed=0, touched=2)

    run(main())


@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_a_relay_that_starts_empty_is_served_the_same_version_again(nursery, tmp_path, transport):
    async def main():
        with Nest(nursery, tmp_path, *options(transport, 2)) as nest:
            pids = [await nest.relay(name) for name in names(2)]
            trainer = nest.trainer(1, 2)
            assert await trainer.publish(4, seed=4) == ""
            kill(pids[0])
            await nest.relay("weight_sync-0")
            if transport == "collective":  # nobody but the trainer has the bytes; it waits for a draw and says so again
                assert await fetched(nest.config, "weight_sync-0", wait_s=0.2) is None
                assert await trainer.publish(4, seed=4) == ""
            version, tensors = await fetched(nest.config, "weight_sync-0")
            assert version == 4
            assert equal(tensors, net(4))

    run(main())


def test_a_version_on_disk_is_a_models_file_and_older_ones_are_gone(nursery, tmp_path):
    async def main():
        with Nest(nursery, tmp_path, *options("disk", 1, f"weight_sync.path={tmp_path / 'shared'}")) as nest:
            await nest.relay()
            trainer = nest.trainer(1, 1)
            (tmp_path / "shared").mkdir()
            (tmp_path / "shared" / "full-000000-00000009-rank-00000.safetensors.77").touch()  # of a writer that died
            for version in range(3):
                assert await trainer.publish(version, seed=version) == ""
            (path,) = (tmp_path / "shared").iterdir()
            assert equal(load_file(path) | {"lm_head.weight": load_file(path)["embed.weight"]}, net(2))

    run(main())


@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_an_older_trainer_is_refused(nursery, tmp_path, transport):
    async def main():
        with Nest(nursery, tmp_path, *options(transport)) as nest:
            await nest.relay()
            old, new = nest.trainer(1, 1), nest.trainer(2, 1)
            assert await old.publish(0, seed=0) == ""
            assert await new.publish(0, seed=1) == ""
            assert "trainer epoch 1 is older than 2" in await old.publish(1, seed=2)
            _, tensors = await fetched(nest.config, "weight_sync")
            assert equal(tensors, net(1))

    run(main())


def test_a_relay_that_freezes_costs_an_operations_deadline_and_its_next_publication_works(nursery, tmp_path):
    # field report 27: the trainer sits in an untimed broadcast after the receiver failed
    async def main():
        with Nest(nursery, tmp_path, *options("collective", 2, "weight_sync.publish_s=3")) as nest:
            pids = [await nest.relay(name) for name in names(2)]
            trainer = nest.trainer(1, 2)
            assert await trainer.publish(0, seed=0) == ""
            os.kill(pids[1], signal.SIGSTOP)
            told = trainer.tell(1, seed=1)
            version, tensors = await fetched(nest.config, "weight_sync-0", have=0)
            assert version == 1  # long before the other one's deadline
            assert equal(tensors, net(1))
            os.kill(pids[1], signal.SIGCONT)
            assert await trainer.wait(told) == ""  # it answered within weight_sync.publish_s
            os.kill(pids[1], signal.SIGSTOP)
            assert "weight_sync.publish_s = 3" in await trainer.publish(2, seed=2)
            assert "failed the last time and has not answered within 2 s" in await trainer.publish(3, seed=3)
            os.kill(pids[1], signal.SIGCONT)
            assert await trainer.publish(4, seed=4) == ""
            await assert_shown(nest, 4, seed=4)

    run(main())
