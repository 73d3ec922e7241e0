"""What is wrong on the way is found out before it is visible: bytes, bases, offers, deadlines."""

import asyncio
import contextlib
import os
import time

import msgspec
import pytest
import torch

from async_rl.errors import PublicationError
from async_rl.protocol.control import GetStatus
from async_rl.protocol.weight_sync import (
    Announce,
    Delivery,
    Folder,
    Links,
    Offer,
    Piece,
    Receive,
    Rejected,
    Seal,
    Slot,
    Visible,
)
from async_rl.rundir import RunDir
from async_rl.services.weight_sync.service import WeightSyncService
from async_rl.weights import disk
from async_rl.weights.carry import Bench, carry_out
from async_rl.weights.draft import draft
from async_rl.weights.links import Channel, Hub
from async_rl.weights.order import Order, Outcome, Task
from async_rl.weights.relays import folder_of, relay_names
from async_rl.weights.writer import Publisher
from tests.flow.actor_material import run, settings
from tests.flow.weights_material import connect, equal, fetched, net

OPTIONS = ("weight_sync.operation_s=2", "weight_sync.bucket_bytes=20000", "weight_sync.relays=2")
FIRST, SECOND = "weight_sync-0", "weight_sync-1"


class Hosts:
    """Two relays and a publisher, all in this process."""

    def __init__(self, runs, transport, *overrides):
        self.config = settings(runs, (*OPTIONS, f"weight_sync.transport={transport}", *overrides))
        self._stack = contextlib.AsyncExitStack()
        self.bench = Bench()

    async def __aenter__(self):
        names = relay_names(self.config)
        self.relays = [WeightSyncService(self.config, name) for name in names]
        self._tasks = [asyncio.create_task(relay.main()) for relay in self.relays]
        await self._stack.__aenter__()
        self.remotes = {
            name: await self._stack.enter_async_context(connect(self.config, "trainer", name)) for name in names
        }
        folder = folder_of(self.config, RunDir.of(self.config))
        self.model = None
        self.publisher = Publisher(
            self.remotes, self.config.weight_sync, epoch=1, everywhere=self.everywhere, folder=folder
        )
        return self

    async def everywhere(self, order):
        encoded = msgspec.msgpack.encode(order)  # as it would reach another process
        order = msgspec.msgpack.decode(encoded, type=Order)
        return [await asyncio.to_thread(carry_out, order, 0, self.model, self.bench)]

    async def publish(self, version, **about):
        self.model = net(**{"seed": version, **about})
        await self.publisher.publish(version, self.model)

    async def version(self, name):
        return (await self.remotes[name].ask(GetStatus())).version

    async def __aexit__(self, *_):
        await self._stack.aclose()
        for relay in self.relays:
            relay.stopping.set()
        await asyncio.gather(*self._tasks)


def flip_once(monkeypatch, cls):
    """One bit of one message of `cls.put` is another one."""
    put, sent = cls.put, []

    def damaged(self, data):
        sent.append(data)
        if len(sent) == 7:
            data = data.clone()
            data[-1] ^= 1
        return put(self, data)

    monkeypatch.setattr(cls, "put", damaged)


@pytest.mark.parametrize(("transport", "cls"), [("collective", Channel), ("disk", disk.Writing)])
def test_a_bit_that_changed_on_its_way_keeps_the_old_version_and_the_next_one_works(
    tmp_path, monkeypatch, transport, cls
):
    # field reports 27, 30 and 35
    async def main():
        async with Hosts(tmp_path, transport) as hosts:
            await hosts.publish(0)
            with monkeypatch.context() as patch:
                flip_once(patch, cls)
                with pytest.raises(
                    PublicationError, match=r"weight_sync-\d: version 1: checksum of parcel \d+ of rank 0"
                ):
                    await hosts.publish(1)
            versions = [await hosts.version(name) for name in (FIRST, SECOND)]
            # over a network one relay got the bad message, on disk both read the same file
            assert sorted(versions) == ([0, 1] if transport == "collective" else [0, 0])
            assert len(hosts.publisher.lacking) == versions.count(0)
            await hosts.publish(2)
            for name in (FIRST, SECOND):
                version, tensors = await fetched(hosts.config, name)
                assert version == 2
                assert equal(tensors, net(2))

    run(main())


@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_a_delta_over_a_base_that_is_damaged_is_never_visible_and_a_full_one_follows(tmp_path, transport):
    async def main():
        async with Hosts(tmp_path, transport, "weight_sync.full_every=100") as hosts:
            await hosts.publish(0, seed=0)
            relay = hosts.relays[0]
            index, _ = relay._table.visible()
            relay._shadows.open(relay._slots.path(index))[1000] ^= 1
            with pytest.raises(PublicationError, match="weight_sync-0: version 1: checksum of parcel"):
                await hosts.publish(1, seed=0, touched=1)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [0, 1]
            await hosts.publish(2, seed=0, touched=2)
            for name in (FIRST, SECOND):
                version, tensors = await fetched(hosts.config, name)
                assert version == 2
                assert equal(tensors, net(0, touched=2))

    run(main())


def test_a_rank_that_does_not_know_the_base_says_so_and_all_of_it_goes_the_next_time(tmp_path):
    async def main():
        async with Hosts(tmp_path, "collective", "weight_sync.full_every=100") as hosts:
            await hosts.publish(0)
            hosts.bench.bases.clear()
            with pytest.raises(PublicationError, match="rank 0: what was sent as version 0 is not known here"):
                await hosts.publish(1)
            await hosts.publish(2)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [2, 2]

    run(main())


def test_a_relay_refuses_what_it_was_not_offered_and_a_base_that_it_has_not_got(tmp_path):
    async def main():
        async with Hosts(tmp_path, "collective") as hosts:
            await hosts.publish(0)
            remote = hosts.remotes[FIRST]
            made = draft(net(1), 1, ["a"], 20000, None)
            links = Links("127.0.0.1", 1, 0, "cpu", 0.5)
            full = Delivery(1, 1, made.nbytes, made.tensors, made.pieces["a"], 20000, -1, links)
            slot = await remote.ask(Offer(1, 1, made.nbytes, base=0))
            assert isinstance(slot, Slot) and slot.base
            assert not (await remote.ask(Offer(1, 1, made.nbytes, base=7))).base
            assert not (await remote.ask(Offer(1, 2, made.nbytes, base=0))).base  # another trainer's 0 is not this one
            slot = await remote.ask(Offer(1, 2, made.nbytes))
            full = msgspec.structs.replace(full, epoch=2)
            partly = msgspec.structs.replace(full, pieces=[[Piece(0, [], [])]])
            for delivery, path, said in (
                (full, slot.path[:-1] + "9", "is not the slot that was given"),
                (msgspec.structs.replace(full, base=0), slot.path, "version 0, on which it builds, is not here"),
                (partly, slot.path, "of .* bytes are to come"),
            ):
                reply = await remote.ask(Receive(delivery, path))
                assert isinstance(reply, Rejected), said
                with pytest.raises(PublicationError, match=said):
                    raise PublicationError(reply.reason)
            reply = await remote.ask(Seal(1, 2, []))
            assert isinstance(reply, Rejected) and "none of it was announced" in reply.reason
            assert await remote.ask(Announce(0, 1)) == Visible(0)
            assert await remote.ask(Announce(0, 2)) == Visible(-1)
            assert await hosts.version(FIRST) == 0

    run(main())


def test_a_relay_without_room_fails_alone_and_names_the_directory(tmp_path, monkeypatch):
    async def main():
        async with Hosts(tmp_path, "collective") as hosts:
            await hosts.publish(0)

            def full(*_, **__):
                raise PublicationError("weight_sync.directory = '/small': no slot of 9 bytes: No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(hosts.relays[0]._slots, "allocate", full)
                with pytest.raises(PublicationError, match=r"^weight_sync-0: version 1: weight_sync.directory"):
                    await hosts.publish(1)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [0, 1]
            assert hosts.publisher.lacking == [FIRST]
            await hosts.publish(1)  # the same version again: to the one that lacks it
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [1, 1]
            assert hosts.publisher.lacking == []

    run(main())


def test_a_rank_that_is_gone_fails_the_publication_and_no_relay_shows_anything(tmp_path):
    async def main():
        async with Hosts(tmp_path, "collective") as hosts:
            await hosts.publish(0)
            hosts.publisher._everywhere = refuse
            with pytest.raises(PublicationError, match="weight_sync-0: rank 3 is gone; weight_sync-1: rank 3 is gone"):
                await hosts.publish(1)
            hosts.publisher._everywhere = hosts.everywhere
            await hosts.publish(2)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [2, 2]

    async def refuse(order):
        raise PublicationError("rank 3 is gone")

    run(main())


def test_nobody_at_the_other_end_is_an_error_of_the_task_within_its_deadline(tmp_path):
    # field report 27: an untimed broadcast
    hub = Hub("127.0.0.1")
    links = Links(hub.host, hub.port, 1, "cpu", 0.5)
    model = net(0)
    made = draft(model, 1, ["a"], 20000, None)
    lost = Delivery(0, 1, made.nbytes, made.tensors, made.pieces["a"], 20000, -1, links)
    fine = msgspec.structs.replace(lost, way=Folder(str(tmp_path)))
    began = time.monotonic()
    outcome = carry_out(Order(0, [Task("a", lost), Task("disk", fine)]), 0, model, Bench())
    assert time.monotonic() - began < 10
    assert "weight_sync.operation_s = 0.5" in outcome.parts[0].error
    assert outcome.parts[1].error == ""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=Outcome) == outcome
    gone = msgspec.structs.replace(lost, way=msgspec.structs.replace(links, port=1))
    outcome = carry_out(Order(0, [Task("a", gone)]), 0, model, Bench())
    assert "weight_sync.operation_s = 0.5" in outcome.parts[0].error


@pytest.mark.parametrize("what", ["missing", "cut", "forbidden"])
def test_a_file_that_cannot_be_read_names_the_setting_and_the_old_version_stays(tmp_path, monkeypatch, what):
    async def main():
        async with Hosts(tmp_path, "disk") as hosts:
            await hosts.publish(0)
            everywhere = hosts.everywhere

            async def harmed(order):
                outcomes = await everywhere(order)
                path = disk.file_of(order.tasks[0].delivery, 0)
                match what:
                    case "missing":
                        path.unlink()
                    case "cut":
                        os.truncate(path, path.stat().st_size - 10)
                    case "forbidden":
                        path.unlink()
                        path.mkdir()
                return outcomes

            hosts.publisher._everywhere = harmed
            said = "bytes are missing" if what == "cut" else "weight_sync.path"
            with pytest.raises(PublicationError, match=said):
                await hosts.publish(1)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [0, 0]

    run(main())


def test_a_model_that_changes_its_tensors_is_another_model(tmp_path):
    async def main():
        async with Hosts(tmp_path, "collective") as hosts:
            await hosts.publish(0)
            with pytest.raises(PublicationError, match=r"not the model of version 0: .* shape"):
                await hosts.publish(1, width=32)
            await hosts.publish(2)
            assert [await hosts.version(name) for name in (FIRST, SECOND)] == [2, 2]

    run(main())


def test_a_mapping_of_tensors_is_published_like_a_module(tmp_path):
    async def main():
        async with Hosts(tmp_path, "shm") as hosts:
            hosts.model = {"a": torch.arange(5.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)}
            await hosts.publisher.publish(0, hosts.model)
            _, tensors = await fetched(hosts.config, FIRST)
            assert all(torch.equal(tensors[name], tensor) for name, tensor in hosts.model.items())

    run(main())
