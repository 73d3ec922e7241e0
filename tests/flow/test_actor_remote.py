"""The asking side: greeting, deadlines, credit, and a service that goes away and comes back."""

import asyncio
import logging
import signal

import numpy as np
import pytest

from async_rl.actor import remote as remote_module
from async_rl.actor import wire
from async_rl.actor.mailbox import Mailbox
from async_rl.actor.remote import MISSED_HEARTBEATS, Remote
from async_rl.errors import DeadlineExceeded, PeerRefused
from async_rl.protocol import SCHEMA
from async_rl.protocol.buffer import BufferReply, BufferRequest, FinishGenerate, LeaseId, LeaseReply, Sampled, Started
from async_rl.protocol.weight_sync import NoNewer, Release, Released
from async_rl.trajectory import Trajectory
from tests.flow.actor_material import BEAT_S, Process, echo, fetch, mailbox, remote, run, serving, until

FIVE = {"high_water_mark": 5}


def test_messages_sent_right_after_connecting_all_arrive():
    # field report 56: ten messages sent right after connecting, none received
    came = []

    async def note(request):
        came.append(request.have)
        return NoNewer(request.have)

    async def main():
        async with serving(note) as box, remote(lambda: box.address) as peer:
            for k in range(10):
                await peer.tell(fetch(k))
        assert came == list(range(10))

    run(main())


def test_a_service_that_starts_after_its_askers_gets_their_messages():
    address = None

    async def main():
        nonlocal address
        async with remote(lambda: address) as peer:
            asked = asyncio.create_task(peer.ask(fetch(4)))
            await asyncio.sleep(0.2)
            async with serving() as box:
                address = box.address
                assert await asked == NoNewer(4)

    run(main())


def test_two_thousand_sends_through_a_queue_of_five_all_arrive():
    # field report 55: a ROUTER drops silently when a peer's pipe is full
    came = []

    async def slow(request):
        await asyncio.sleep(0)
        came.append(request.have)
        return NoNewer(request.have)

    async def main():
        async with serving(slow, **FIVE) as box, remote(lambda: box.address, **FIVE) as peer:
            for k in range(2000):
                await peer.tell(fetch(k))
            await until(lambda: len(came) >= 2000)
        assert sorted(came) == list(range(2000))

    run(main())


def test_two_thousand_asks_through_a_queue_of_five_are_all_answered():
    # field report 55
    async def main():
        async with serving(**FIVE) as box, remote(lambda: box.address, **FIVE) as peer:
            answers = await asyncio.gather(*(peer.ask(fetch(k)) for k in range(2000)))
        assert answers == [NoNewer(k) for k in range(2000)]

    run(main())


def test_a_sender_beyond_its_credit_waits_and_its_deadline_tells_it():
    # field report 55: or the sender is told
    async def main():
        async with serving() as box, remote(lambda: box.address, ask_s=0.5) as peer:
            for _ in range(wire.CREDIT):
                await peer.tell(fetch(wait_s=500))
            with pytest.raises(DeadlineExceeded, match=r"services.ask_s = 0.5"):
                await peer.tell(fetch(wait_s=500))

    run(main())


def test_a_tell_that_is_refused_or_not_carried_out_is_a_line_in_the_senders_log(caplog):
    async def main():
        async with serving() as box, remote(lambda: box.address, ask_s=0.3) as peer:
            await peer.tell(Release("revoked", 1))
            await peer.tell(fetch(wait_s=500))
            await until(lambda: len(caplog.messages) == 2)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "test: Release did not reach weight_sync: weight_sync: this ticket is revoked" in caplog.messages[0]
    assert "Fetch did not reach weight_sync" in caplog.messages[1]


@pytest.mark.parametrize(("address", "where"), [(None, "no address"), ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")])
def test_nobody_there_names_what_is_missing_and_the_setting(address, where):
    async def main():
        async with remote(lambda: address, connect_s=0.3) as peer:
            with pytest.raises(DeadlineExceeded) as caught:
                await peer.ask(fetch())
        assert where in str(caught.value)
        assert "the greeting of weight_sync" in str(caught.value)
        assert "services.connect_s = 0.3" in str(caught.value)

    run(main())


def test_another_schema_is_refused_at_once_and_for_good(monkeypatch):
    monkeypatch.setattr(remote_module, "SCHEMA", 99)

    async def main():
        async with serving() as box, remote(lambda: box.address) as peer:
            for _ in range(2):
                with pytest.raises(PeerRefused, match=rf"message schema {SCHEMA}, test speaks 99"):
                    await peer.ask(fetch())

    run(main())


def test_the_wrong_service_is_refused_with_both_names():
    async def main():
        changes = {"service": "buffer", "connect_s": 0.5}
        async with serving() as box, remote(lambda: box.address, **changes) as peer:
            with pytest.raises(PeerRefused, match="is the service weight_sync, not buffer"):
                await peer.ask(fetch())

    run(main())


def test_a_port_that_passed_to_another_service_is_left_when_the_right_one_announces_itself():
    async def main():
        other = Mailbox("", "buffer", BufferRequest, BufferReply, echo)
        async with other:
            serve = asyncio.create_task(other.serve())
            address = other.address
            async with remote(lambda: address) as peer:
                asked = asyncio.create_task(peer.ask(fetch(6)))
                await asyncio.sleep(3 * BEAT_S)
                async with serving() as box:
                    address = box.address
                    assert await asked == NoNewer(6)
            serve.cancel()

    run(main())


@pytest.mark.parametrize("same_port", [True, False])
def test_what_a_dead_service_left_unanswered_its_successor_answers(same_port):
    asked = []

    async def first(request):
        asked.append(request.have)
        await asyncio.sleep(500)

    async def main():
        async with serving(first) as box:
            address = box.address
            peer = await remote(lambda: address).__aenter__()
            pending = [asyncio.create_task(peer.ask(fetch(k))) for k in range(20)]
            await until(lambda: len(asked) == 20)
        async with serving(address=address if same_port else "") as box:
            address = box.address
            assert await asyncio.gather(*pending) == [NoNewer(k) for k in range(20)]
            assert await peer.ask(fetch(21)) == NoNewer(21)
            await peer.__aexit__()

    run(main())


def test_a_killed_service_is_noticed_within_the_missed_heartbeats_and_its_successor_found(tmp_path):
    async def main():
        rundir = None
        with Process("echo", tmp_path) as victim:
            rundir = victim.rundir
            await until(victim.announced)
            async with remote(lambda: rundir.address("weight_sync")) as peer:
                assert await peer.ask(fetch(1)) == NoNewer(1)
                long = asyncio.create_task(peer.ask(fetch(3, wait_s=0.5), wait_s=0.5))
                await asyncio.sleep(0.1)
                victim.popen.send_signal(signal.SIGKILL)
                began = asyncio.get_running_loop().time()
                await until(lambda: peer._link is None)
                beats = (asyncio.get_running_loop().time() - began) / BEAT_S
                assert beats < 3 * MISSED_HEARTBEATS  # a busy machine may be late, not blind
                with Process("echo", tmp_path) as successor:
                    await until(successor.announced)
                    assert await long == NoNewer(3)
                    assert await peer.ask(fetch(4)) == NoNewer(4)

    run(main())


def test_a_frozen_service_does_not_freeze_who_asks(tmp_path):
    async def main():
        with Process("echo", tmp_path) as frozen:
            await until(frozen.announced)
            async with remote(lambda: frozen.rundir.address("weight_sync"), ask_s=1.0) as peer:
                await peer.ask(fetch())
                frozen.popen.send_signal(signal.SIGSTOP)
                with pytest.raises(DeadlineExceeded, match=r"services.ask_s = 1"):
                    await peer.ask(fetch())
                frozen.popen.send_signal(signal.SIGCONT)
                await until(lambda: peer._link is not None)
                assert await peer.ask(fetch(2)) == NoNewer(2)

    run(main())


def test_an_asker_that_is_cancelled_leaves_nothing_behind():
    async def main():
        async with serving() as box, remote(lambda: box.address) as peer:
            await peer.ask(fetch())
            tasks = [asyncio.create_task(peer.ask(fetch(wait_s=500), wait_s=500)) for _ in range(wire.CREDIT)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not peer._pending
            assert not peer._credit.locked()

    run(main())


def test_malformed_replies_are_one_warning_and_the_connection_lives(caplog):
    async def main():
        async with serving() as box, remote(lambda: box.address) as peer:
            await peer.ask(fetch())
            (identity,) = box._greeted
            for frames in ([b""], [b"garbage"], [wire.encode_envelope(wire.Hello(1, "x", "y"))]):
                await box._send(identity, frames)
            await box._send(identity, [wire.encode_envelope(wire.Reply(10**9)), b"nobody asked"])
            assert await peer.ask(fetch(7)) == NoNewer(7)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert len(caplog.messages) == 3


def test_a_big_array_arrives_whole_and_does_not_stall_the_heartbeats_of_others():
    # field reports 45 and 57: decoding is a view, so the loop stays free while 100 MB come in
    array = np.arange(25_000_000, dtype=np.float32)
    n = array.shape[0]
    seen = []

    async def take(request):
        if isinstance(request, FinishGenerate):
            seen.append(request.results[0].trajectory.logprobs)
        return LeaseReply("accepted")

    async def main():
        trajectory = Trajectory(np.zeros(n, np.int32)[:1], np.ones(1, bool), array, [(0, 1)], stop="eos", text="")
        box = Mailbox("", "buffer", BufferRequest, BufferReply, take)
        times = {"connect_s": 20, "ask_s": 20, "heartbeat_s": BEAT_S}
        async with box:
            serve = asyncio.create_task(box.serve())
            peers = [Remote("buffer", lambda: box.address, BufferRequest, BufferReply, sender=s, **times) for s in "ab"]
            async with peers[0] as peer, peers[1] as other:
                lease = LeaseId(1, 0, "generate")
                assert await other.ask(Started("rollout-1", "i", lease, 0)) == LeaseReply("accepted")
                big = asyncio.create_task(peer.ask(FinishGenerate("rollout-0", "i", [Sampled(lease, 0, trajectory)])))
                answered = 0
                while not big.done():
                    await other.ask(Started("rollout-1", "i", lease, 0))
                    answered += 1
                assert await big == LeaseReply("accepted")
            serve.cancel()
        assert answered > 3  # it is under way for many of them
        assert np.array_equal(seen[0], array)
        assert not seen[0].flags.writeable
        assert seen[0].base is not None

    run(main())


def test_leaving_right_after_a_tell_still_delivers_it():
    came = asyncio.Event()

    async def note(request):
        came.set()
        return Released(True)

    async def main():
        async with serving(note) as box:
            async with remote(lambda: box.address) as peer:
                await peer.tell(Release("x", 1))
            async with asyncio.timeout(5):
                await came.wait()

    run(main())


def test_leaving_is_quick_although_the_peer_is_gone():
    async def main():
        async with mailbox() as box:
            serve = asyncio.create_task(box.serve())
            async with remote(lambda: box.address) as peer:
                await peer.ask(fetch())
                serve.cancel()
                for _ in range(20):
                    await peer.tell(fetch())

    run(main(), limit_s=10)
