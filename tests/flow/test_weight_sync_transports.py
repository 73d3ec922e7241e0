"""Publications of one and two ranks to one and two relays, over every transport, bit for bit."""

import itertools

import pytest
import torch

from tests.flow.actor_material import run
from tests.flow.weights_material import Nursery, equal, fetched, net

QUICK = ("weight_sync.operation_s=2", "weight_sync.publish_s=15", "weight_sync.bucket_bytes=20000")


def options(transport, relays=1, *more):
    return (*QUICK, f"weight_sync.transport={transport}", f"weight_sync.relays={relays}", *more)


def names(relays):
    return ["weight_sync"] if relays == 1 else [f"weight_sync-{k}" for k in range(relays)]


@pytest.mark.parametrize(
    ("transport", "ranks", "relays"), list(itertools.product(["shm", "collective", "disk"], [1, 2], [1, 2]))
)
def test_what_arrives_is_the_trainers_model_bit_for_bit(tmp_path, transport, ranks, relays):
    # field reports 28, 29, 36: every name, tied and untied; 35: the version is the publication's
    async def main():
        with Nursery(tmp_path, *options(transport, relays)) as nursery:
            for name in names(relays):
                await nursery.relay(name)
            trainer = nursery.trainer(1, ranks)
            for version in range(3):
                assert await trainer.publish(version, seed=version) == ""
                for name in names(relays):
                    found, tensors = await fetched(nursery.config, name)
                    assert found == version
                    assert equal(tensors, net(version))

    run(main())


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
def test_a_head_of_its_own_and_another_dtype_than_the_trainers(tmp_path, transport):
    # field report 29
    async def main():
        with Nursery(tmp_path, *options(transport)) as nursery:
            await nursery.relay()
            trainer = nursery.trainer(1, 2)
            for version in range(2):
                assert await trainer.publish(version, seed=version, tied=False, dtype="bfloat16") == ""
                _, tensors = await fetched(nursery.config, "weight_sync")
                assert equal(tensors, net(version, tied=False), torch.bfloat16)

    run(main())
