"""A version on its way from the trainer to the rollouts, through a real relay and real shared files."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest
import torch

from async_rl.errors import PublicationError
from async_rl.protocol.control import GetStatus
from async_rl.protocol.weight_sync import (
    Commit,
    Offer,
    Rejected,
    Slot,
    Visible,
    WeightSyncReply,
    WeightSyncRequest,
)
from async_rl.services.weight_sync import service as relay_module
from async_rl.services.weight_sync.service import WeightSyncService
from async_rl.weights import shm
from async_rl.weights.reader import Subscriber
from async_rl.weights.slot import Maps
from async_rl.weights.writer import Publisher
from tests.flow.actor_material import Echo, run, settings, until

torch.set_num_threads(1)


class Model(torch.nn.Module):
    """An embedding, a fused projection and a head, tied or not."""

    def __init__(self, seed, tied=True, width=32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(64, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.norm = torch.nn.LayerNorm(width)
        self.lm_head = torch.nn.Linear(width, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).chunk(3, dim=-1)
        return self.lm_head(self.norm(q * k + v))


def load(model, received):
    """What a rollout does: every tensor into its live parameter, aliases included."""
    live = model.state_dict()
    with torch.no_grad():
        for name, tensor in received.tensors():
            live[name].copy_(tensor)
        for alias, canonical in received.aliases.items():
            if live[alias].data_ptr() != live[canonical].data_ptr():
                live[alias].copy_(live[canonical])


def same(first, second):
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Host:
    """A relay in this process, with what connects to it."""

    def __init__(self, runs, *overrides, **services):
        self.config = settings(runs, overrides, **services)
        self.relay = WeightSyncService(self.config, "weight_sync")
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        self._task = asyncio.create_task(self.relay.main())
        await self._stack.__aenter__()
        self.remote = await self.connect("test")
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()
        self.relay.stopping.set()
        await self._task

    async def connect(self, name):
        remote = Echo(self.config, name).remote("weight_sync", WeightSyncRequest, WeightSyncReply)
        return await self._stack.enter_async_context(remote)

    async def publisher(self, epoch=1):
        return Publisher({"weight_sync": await self.connect("trainer")}, self.config.weight_sync, epoch=epoch)

    async def subscriber(self, worker="rollout-0", incarnation="one"):
        return Subscriber(await self.connect(worker), worker, incarnation)

    async def status(self):
        return await self.remote.ask(GetStatus())


def shorten(path, nbytes):
    """Another file of `nbytes` at `path`; the old one may be mapped."""
    path.unlink()
    path.write_bytes(bytes(nbytes))


def files(folder):
    return [path.name for path in Path(folder).iterdir() if path.name.startswith("async-rl-")]


@pytest.mark.parametrize("tied", [True, False])
def test_after_a_sync_the_live_model_equals_the_trainers_in_every_name_and_in_its_logits(tmp_path, tied):
    # field reports 28 and 29
    async def main():
        trainer, rollout = Model(1, tied), Model(2, tied)
        ids = torch.arange(64).view(1, 64)
        async with Host(tmp_path, "weight_sync.bucket_bytes=1000") as host:
            publisher, subscriber = await host.publisher(), await host.subscriber()
            for version in range(4):
                await publisher.publish(version, trainer)
                received = await subscriber.fetch(version - 1, 5.0)
                assert received.version == version
                assert {name for name, _ in received.tensors()} | set(received.aliases) == set(trainer.state_dict())
                load(rollout, received)
                assert await subscriber.release(received)
                assert same(trainer, rollout)
                assert torch.equal(trainer(ids), rollout(ids))
                with torch.no_grad():
                    for parameter in trainer.parameters():
                        parameter.add_(0.01)
                assert not same(trainer, rollout)

    run(main())


def test_a_tied_publication_reaches_a_receiver_whose_head_is_its_own(tmp_path):
    # field report 29: the head's copy goes stale
    async def main():
        trainer, rollout = Model(1, tied=True), Model(2, tied=False)
        async with Host(tmp_path) as host:
            await (await host.publisher()).publish(0, trainer)
            received = await (await host.subscriber()).fetch(-1, 5.0)
            assert received.aliases == {"lm_head.weight": "embed.weight"}
            load(rollout, received)
            assert torch.equal(rollout.lm_head.weight, trainer.embed.weight)

    run(main())


def test_hundreds_of_tensors_take_one_offer_and_one_commit(tmp_path, monkeypatch):
    # field report 36: hundreds of per-parameter calls exceed the time-out
    asked = []
    handle = WeightSyncService.handle

    async def counted(self, request):
        asked.append(type(request).__name__)
        return await handle(self, request)

    monkeypatch.setattr(WeightSyncService, "handle", counted)

    async def main():
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(n % 7 + 1)) for n in range(600)])
        async with Host(tmp_path, "weight_sync.bucket_bytes=4096") as host:
            await (await host.publisher()).publish(0, model)
            received = await (await host.subscriber()).fetch(-1, 5.0)
            for name, tensor in received.tensors():
                assert torch.equal(tensor, model.state_dict()[name])
        assert asked == ["Offer", "Commit", "Fetch"]

    run(main())


def test_a_damaged_publication_leaves_the_old_version_and_the_next_one_works(tmp_path, monkeypatch):
    # field reports 27, 30 and 35
    write = shm.write

    def damaged(delivery, rank, source, slot):
        checksums = write(delivery, rank, source, slot)
        slot[delivery.nbytes - 1] ^= 1
        return checksums

    async def main():
        async with Host(tmp_path, "weight_sync.bucket_bytes=1000") as host:
            publisher, subscriber = await host.publisher(), await host.subscriber()
            await publisher.publish(0, Model(0))
            monkeypatch.setattr(shm, "write", damaged)
            with pytest.raises(PublicationError, match=r"version 1: checksum of bucket \d+ is wrong"):
                await publisher.publish(1, Model(1))
            assert (await host.status()).version == 0
            assert await subscriber.fetch(0, 0.1) is None
            monkeypatch.setattr(shm, "write", write)
            await publisher.publish(2, Model(2))
            received = await subscriber.fetch(0, 5.0)
            rollout = Model(9)
            load(rollout, received)
            assert received.version == 2
            assert same(rollout, Model(2))

    run(main())


def test_another_model_under_the_same_run_is_rejected_by_name_and_shape(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            publisher = await host.publisher()
            await publisher.publish(0, Model(0))
            with pytest.raises(PublicationError, match=r"not the model of version 0: .* shape"):
                await publisher.publish(1, Model(0, width=16))
            with pytest.raises(PublicationError, match=r"not the model of version 0: .* missing"):
                await publisher.publish(1, torch.nn.Linear(2, 2))
            assert (await host.status()).version == 0
            await publisher.publish(1, Model(1))

    run(main())


def test_a_commit_whose_slot_is_cut_gone_or_elsewhere_is_rejected(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            await (await host.publisher()).publish(0, Model(0))
            slot = await host.remote.ask(Offer(1, 1, 40_000))
            assert isinstance(slot, Slot)
            _, visible = host.relay._table.visible()
            manifest = msgspec.structs.replace(visible, version=1)
            elsewhere = tmp_path / "elsewhere"
            elsewhere.write_bytes(bytes(manifest.nbytes))
            for path, change, said in (
                (elsewhere, None, "no slot of this run"),
                (Path(slot.path), None, "checksum of bucket 0 is wrong"),
                (Path(slot.path), lambda path: shorten(path, 100), f"has 100 of {manifest.nbytes} bytes"),
                (Path(slot.path), Path.unlink, "No such file"),
            ):
                if change is not None:
                    change(path)
                reply = await host.remote.ask(Commit(manifest, str(path)))
                assert isinstance(reply, Rejected)
                assert said in reply.reason
            wrong = msgspec.structs.replace(manifest, buckets=manifest.buckets[1:])
            assert isinstance(await host.remote.ask(Commit(wrong, slot.path)), Rejected)
            assert (await host.status()).version == 0

    run(main())


def test_a_slot_that_does_not_fit_names_the_directory_and_the_next_publication_works(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            reply = await host.remote.ask(Offer(0, 1, 10**15))
            assert isinstance(reply, Rejected)
            assert "weight_sync.directory" in reply.reason
            await (await host.publisher()).publish(0, Model(0))
            assert (await host.status()).version == 0

    run(main())


def test_an_older_trainer_is_refused(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            old, new = await host.publisher(epoch=1), await host.publisher(epoch=2)
            await old.publish(4, Model(0))
            await new.publish(4, Model(1))
            with pytest.raises(PublicationError, match="epoch 1 is older than 2"):
                await old.publish(5, Model(2))
            with pytest.raises(PublicationError, match="version 3 is older than the visible 4"):
                await new.publish(3, Model(2))
            received = await (await host.subscriber()).fetch(-1, 5.0)
            assert (received.version, received.manifest.epoch) == (4, 2)

    run(main())


def test_a_fetch_waits_for_the_next_version_and_gets_the_newest(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            publisher, subscriber = await host.publisher(), await host.subscriber()
            waiting = asyncio.create_task(subscriber.fetch(-1, 20.0))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await publisher.publish(0, Model(0))
            assert (await waiting).version == 0
            assert await subscriber.fetch(0, 0.1) is None
            for version in (1, 2, 3):
                await publisher.publish(version, Model(version))
            assert (await subscriber.fetch(0, 5.0)).version == 3  # versions may be skipped

    run(main())


def test_sixteen_readers_keep_what_they_read_while_the_next_version_comes(tmp_path):
    # field report 34: publishing a version label aborts everything in flight
    async def main():
        async with Host(tmp_path) as host:
            publisher = await host.publisher()
            await publisher.publish(0, Model(0))
            readers = [await host.subscriber(f"rollout-{k}") for k in range(16)]
            received = await asyncio.gather(*(reader.fetch(-1, 5.0) for reader in readers))
            await publisher.publish(1, Model(1))
            await publisher.publish(2, Model(2))
            rollout = Model(9)
            load(rollout, received[7])
            assert same(rollout, Model(0))
            released = [await r.release(x) for r, x in zip(readers, received, strict=True)]
            assert released == [True] * 16
            assert (await host.status()).detail["revoked"] == 0

    run(main())


def test_a_reader_that_is_too_slow_is_told_and_reads_again_and_the_trainer_never_waits(tmp_path):
    async def main():
        async with Host(tmp_path, "weight_sync.slots=2") as host:
            publisher, subscriber = await host.publisher(), await host.subscriber()
            await publisher.publish(0, Model(0))
            received = await subscriber.fetch(-1, 5.0)
            async with asyncio.timeout(5):
                await publisher.publish(1, Model(1))
                await publisher.publish(2, Model(2))
            assert not await subscriber.release(received)
            again = await subscriber.fetch(-1, 5.0)
            rollout = Model(9)
            load(rollout, again)
            assert await subscriber.release(again)
            assert same(rollout, Model(2))

    run(main())


def test_a_visible_slot_that_is_damaged_is_an_error_of_the_reader_and_the_next_version_works(tmp_path):
    # field report 30: the engine kept wrong weights while the logs looked healthy
    async def main():
        async with Host(tmp_path) as host:
            publisher, subscriber = await host.publisher(), await host.subscriber()
            await publisher.publish(0, Model(0))
            index, _ = host.relay._table.visible()
            Maps(writable=True).open(host.relay._slots.path(index))[5] ^= 1
            with pytest.raises(PublicationError, match="version 0 from weight_sync: checksum of bucket 0"):
                await subscriber.fetch(-1, 5.0)
            await publisher.publish(1, Model(1))
            assert (await subscriber.fetch(-1, 5.0)).version == 1

    run(main())


def test_a_worker_started_anew_drops_the_ticket_of_the_one_before(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            await (await host.publisher()).publish(0, Model(0))
            old, new = await host.subscriber(incarnation="one"), await host.subscriber(incarnation="two")
            stale = await old.fetch(-1, 5.0)
            fresh = await new.fetch(-1, 5.0)
            assert (await host.status()).detail["readers"] == 1
            assert not await old.release(stale)
            assert await new.release(fresh)

    run(main())


def test_the_relay_answers_while_it_verifies(tmp_path, monkeypatch):
    # field report 45, in its kind: long work delays no heartbeat
    check, verifying, go = relay_module.check_buckets, asyncio.Event(), asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def slow(manifest, buffer):
            loop.call_soon_threadsafe(verifying.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(20)
            return check(manifest, buffer)

        monkeypatch.setattr(relay_module, "check_buckets", slow)
        async with Host(tmp_path) as host:
            publisher = await host.publisher()
            publishing = asyncio.create_task(publisher.publish(0, Model(0)))
            await verifying.wait()
            assert (await host.status()).version == -1  # visible last
            go.set()
            await publishing
            assert (await host.status()).version == 0

    run(main())


def test_a_deadline_in_the_middle_of_writing_is_named_and_the_next_publication_works(tmp_path, monkeypatch):
    # field report 27: the error surfaces within the time-out, and the next publication works
    write = shm.write

    async def main():
        loop, go = asyncio.get_running_loop(), asyncio.Event()

        def slow(*args):
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(20)
            return write(*args)

        async with Host(tmp_path, "weight_sync.publish_s=0.5") as host:
            publisher = await host.publisher()
            await publisher.publish(0, Model(0))
            monkeypatch.setattr(shm, "write", slow)
            with pytest.raises(PublicationError, match=r"version 1 .* \(weight_sync.publish_s = 0.5\)"):
                await publisher.publish(1, Model(1))
            monkeypatch.setattr(shm, "write", write)
            assert (await host.status()).version == 0
            go.set()
            await publisher.publish(2, Model(2))
            received = await (await host.subscriber()).fetch(-1, 5.0)
            rollout = Model(9)
            load(rollout, received)
            assert same(rollout, Model(2))

    run(main())


def test_a_repeat_of_the_same_publication_writes_nothing(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            publisher = await host.publisher()
            await publisher.publish(3, Model(0))
            await publisher.publish(3, Model(0))
            assert (await host.status()).detail["published"] == 1
            last = publisher._lines[0].last
            assert await host.remote.ask(Commit(last.manifest, last.path)) == Visible(3)

    run(main())


def test_a_stop_lets_waiting_fetches_go_and_leaves_no_slot(tmp_path):
    async def main():
        async with Host(tmp_path) as host:
            await (await host.publisher()).publish(0, Model(0))
            assert files(tmp_path)
            subscriber = await host.subscriber()
            waiting = asyncio.create_task(subscriber.fetch(0, 20.0))
            await until(lambda: host.relay._table._turns)
            host.relay.stopping.set()
            await host._task
            waiting.cancel()
        assert files(tmp_path) == []

    run(main())
