"""Processes that die in the middle of a publication: readers, the relay, a whole run."""

import asyncio
import contextlib
import signal

import pytest
import torch

from async_rl.config.schema import WeightSync
from async_rl.errors import PublicationError
from async_rl.protocol.control import GetStatus, Stop
from async_rl.protocol.weight_sync import Fence, WeightSyncReply, WeightSyncRequest
from async_rl.rundir import RunDir
from async_rl.weights import shm, writer
from async_rl.weights.reader import Subscriber
from async_rl.weights.writer import Publisher
from tests.flow.actor_material import Echo, Process, run, settings, until
from tests.flow.test_weight_sync_publication import Model, files, load, same

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick_announcements(monkeypatch):
    monkeypatch.setattr(writer, "ANNOUNCE_S", 0.1)


def connection(runs, name="test", **services):
    return Echo(settings(runs, **services), name).remote("weight_sync", WeightSyncRequest, WeightSyncReply)


@contextlib.asynccontextmanager
async def ends(runs):
    """The trainer's and a rollout's connection to the relay."""
    async with connection(runs, "trainer") as trainer, connection(runs, "rollout-0") as rollout:
        yield trainer, rollout


def publisher(remote, epoch=1, publish_s=20.0):
    return Publisher({"weight_sync": remote}, WeightSync(bucket_bytes=4096, publish_s=publish_s), epoch=epoch)


async def weights_of(subscriber, have=-1):
    received = await subscriber.fetch(have, 10.0)
    model = Model(99)
    load(model, received)
    return received.version, model, await subscriber.release(received)


def test_a_reader_killed_while_it_reads_stops_nobody(tmp_path):
    async def main():
        with Process("relay", tmp_path) as relay:
            await until(relay.announced)
            async with (
                connection(tmp_path, "trainer") as trainer,
                connection(tmp_path, "rollout-0") as rollout,
            ):
                source = publisher(trainer)
                await source.publish(0, Model(0))
                with Process("reader", tmp_path) as reader:
                    await until((reader.rundir.path / "reading").exists)
                    reader.popen.send_signal(signal.SIGKILL)
                    reader.popen.wait()
                for version in range(1, 8):
                    await source.publish(version, Model(version))
                    assert len(files(tmp_path)) <= 3
                version, model, valid = await weights_of(Subscriber(rollout, "rollout-0", "two"))
                assert (version, valid) == (7, True)
                assert same(model, Model(7))
                assert (await trainer.ask(GetStatus())).detail["readers"] == 0

    run(main())


def test_a_killed_relay_that_is_started_anew_adopts_what_the_trainer_announces(tmp_path):
    async def main():
        async with ends(tmp_path) as (trainer, rollout):
            source, subscriber = publisher(trainer), Subscriber(rollout, "rollout-0", "one")
            announcing = asyncio.create_task(source.announce_forever())
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                for version in range(3):
                    await source.publish(version, Model(version))
                reading = await subscriber.fetch(-1, 10.0)
                relay.popen.send_signal(signal.SIGKILL)
                relay.popen.wait()
            assert files(tmp_path)
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                # the trainer waits for a draw meanwhile: nobody publishes, the announcement is enough
                version, model, valid = await weights_of(Subscriber(rollout, "rollout-1", "x"))
                assert (version, valid) == (2, True)
                assert same(model, Model(2))
                # a ticket of the dead relay: the reader is told to read again
                assert not await subscriber.release(reading)
                for version in range(3, 6):
                    await source.publish(version, Model(version))
                version, model, valid = await weights_of(subscriber, have=2)
                assert (version, valid) == (5, True)
                assert same(model, Model(5))
                await trainer.ask(Stop("enough"))
                assert await asyncio.to_thread(relay.popen.wait, 10) == 0
            announcing.cancel()
        assert files(tmp_path) == []

    run(main())


def test_a_reader_of_a_killed_relay_keeps_its_bytes_while_the_next_one_publishes(tmp_path):
    async def main():
        async with ends(tmp_path) as (trainer, rollout):
            source, subscriber = publisher(trainer), Subscriber(rollout, "rollout-0", "one")
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                await source.publish(0, Model(0))
                reading = await subscriber.fetch(-1, 10.0)
                await source.publish(1, Model(1))
                relay.kill()
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                await source.publish(2, Model(2))
                model = Model(99)
                load(model, reading)
                assert same(model, Model(0))

    run(main())


def test_a_relay_that_lost_its_slots_is_served_again_without_the_model(tmp_path):
    async def main():
        async with ends(tmp_path) as (trainer, rollout):
            source, subscriber = publisher(trainer), Subscriber(rollout, "rollout-0", "one")
            announcing = asyncio.create_task(source.announce_forever())
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                await source.publish(4, Model(4))
                relay.popen.terminate()
                await asyncio.to_thread(relay.popen.wait, 10)
            assert files(tmp_path) == []
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                version, model, valid = await weights_of(subscriber)
                assert (version, valid) == (4, True)
                assert same(model, Model(4))
            announcing.cancel()

    run(main())


def test_a_relay_killed_between_offer_and_commit_does_not_lose_the_publication(tmp_path, monkeypatch):
    write = shm.write

    async def main():
        loop, writing, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def slow(*args):
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(20)
            return write(*args)

        async with ends(tmp_path) as (trainer, rollout):
            source = publisher(trainer)
            announcing = asyncio.create_task(source.announce_forever())
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                await source.publish(0, Model(0))
                monkeypatch.setattr(shm, "write", slow)
                publishing = asyncio.create_task(source.publish(1, Model(1)))
                await writing.wait()
                relay.kill()
            with Process("relay", tmp_path) as relay:
                await until(relay.announced)
                await asyncio.sleep(0.5)  # time for announcements, were there any
                async with connection(tmp_path) as other:
                    assert (await other.ask(GetStatus())).version == -1  # none while a slot is written
                go.set()
                await publishing
                version, model, _ = await weights_of(Subscriber(rollout, "rollout-0", "one"))
                assert version == 1
                assert same(model, Model(1))
            announcing.cancel()

    run(main())


def test_a_publication_without_a_relay_fails_within_its_deadline_and_the_next_one_works(tmp_path):
    # field report 27: the trainer sits in an untimed broadcast after the receiver failed
    async def main():
        async with connection(tmp_path, "trainer") as trainer:
            source = publisher(trainer, publish_s=0.5)
            with pytest.raises(PublicationError, match=r"version 0 .* \(weight_sync.publish_s = 0.5\)"):
                await source.publish(0, Model(0))
            source = publisher(trainer)
            with Process("relay", tmp_path):
                await source.publish(0, Model(0))

    run(main())


def test_a_frozen_relay_fails_the_publication_within_its_deadline_and_the_next_one_works(tmp_path):
    # field report 27
    async def main():
        with Process("relay", tmp_path) as relay:
            await until(relay.announced)
            async with (
                connection(tmp_path, "trainer") as trainer,
                connection(tmp_path, "rollout-0") as rollout,
            ):
                source = publisher(trainer, publish_s=2.0)
                await source.publish(0, Model(0))
                relay.popen.send_signal(signal.SIGSTOP)
                with pytest.raises(PublicationError, match=r"weight_sync.publish_s = 2"):
                    await source.publish(1, Model(1))
                relay.popen.send_signal(signal.SIGCONT)
                await source.publish(2, Model(2))
                version, model, _ = await weights_of(Subscriber(rollout, "rollout-0", "one"))
                assert version == 2
                assert same(model, Model(2))

    run(main())


def test_a_relay_started_anew_refuses_a_trainer_that_was_replaced_before(tmp_path):
    async def main():
        run_folder = RunDir.of(settings(tmp_path))
        run_folder.create()
        assert [run_folder.next_trainer_epoch() for _ in range(2)] == [1, 2]
        with Process("relay", tmp_path) as relay:
            await until(relay.announced)
            async with connection(tmp_path, "trainer") as trainer:
                with pytest.raises(PublicationError, match="trainer epoch 1 is older than 2"):
                    await publisher(trainer, epoch=1).publish(3, Model(3))
                await publisher(trainer, epoch=2).publish(3, Model(3))
                await trainer.ask(Fence(3))
                with pytest.raises(PublicationError, match="trainer epoch 2 is older than 3"):
                    await publisher(trainer, epoch=2).publish(4, Model(4))

    run(main())


def test_what_a_killed_run_left_is_gone_when_the_next_one_of_its_name_ends(tmp_path):
    async def main():
        with Process("relay", tmp_path) as relay:
            await until(relay.announced)
            async with connection(tmp_path, "trainer") as trainer:
                source = publisher(trainer)
                for version in range(3):
                    await source.publish(version, Model(version))
        left = files(tmp_path)
        assert left
        with Process("relay", tmp_path) as relay:
            await until(relay.announced)
            async with connection(tmp_path, "trainer") as trainer:
                await publisher(trainer, epoch=2).publish(0, Model(7))
                assert (await trainer.ask(GetStatus())).version == 0
                await trainer.ask(Stop("over"))
                assert await asyncio.to_thread(relay.popen.wait, 10) == 0
        assert files(tmp_path) == []

    run(main())
