"""The receiving side: it greets, answers, refuses, and nothing that is sent to it ends it."""

import asyncio
import logging

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.actor import mailbox as mailbox_module
from async_rl.actor import wire
from async_rl.actor.mailbox import refuse_public
from async_rl.errors import DeadlineExceeded, InvariantError, PeerRefused, UserError
from async_rl.protocol import SCHEMA
from async_rl.protocol.weight_sync import NoNewer, Rejected, Release, Released, WeightSyncRequest
from tests.flow.actor_material import echo, fetch, mailbox, remote, run, serving, until

REQUESTS = wire.Codec(WeightSyncRequest)


class Raw:
    """A peer that sends whatever it likes."""

    def __init__(self, address, high_water_mark=1000):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set_hwm(high_water_mark)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    async def send(self, *frames):
        await self.socket.send_multipart(frames)

    async def receive(self):
        async with asyncio.timeout(10):
            frames = await self.socket.recv_multipart()
        return wire.decode_envelope(frames[0])

    async def greet(self, schema=SCHEMA, service="weight_sync", run=""):
        await self.send(wire.encode_envelope(wire.Hello(schema, service, "raw", run)))
        return await self.receive()

    async def ask(self, sequence, message):
        await self.send(wire.encode_envelope(wire.Request(sequence, True)), *REQUESTS.encode(message))


def test_a_request_before_the_greeting_is_not_served():
    async def main():
        async with serving() as box:
            with Raw(box.address) as peer:
                await peer.ask(1, fetch())
                assert await peer.receive() == wire.Ungreeted()
                assert isinstance(await peer.greet(), wire.Welcome)
                await peer.ask(2, fetch())
                assert await peer.receive() == wire.Reply(2)

    run(main())


def test_another_schema_is_refused_with_both_numbers():
    async def main():
        async with serving() as box:
            with Raw(box.address) as peer:
                refusal = await peer.greet(schema=SCHEMA + 41)
                assert refusal.final
                assert f"schema {SCHEMA}" in refusal.reason
                assert f"speaks {SCHEMA + 41}" in refusal.reason

    run(main())


def test_another_service_and_another_run_are_refused():
    async def main():
        async with serving(run="/runs/a") as box:
            with Raw(box.address) as peer:
                assert "is the service weight_sync, not buffer" in (await peer.greet(service="buffer")).reason
                assert "belongs to the run /runs/a, not to /runs/b" in (await peer.greet(run="/runs/b")).reason
                assert isinstance(await peer.greet(run="/runs/a"), wire.Welcome)

    run(main())


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"garbage"],
        [b"\x91" * 50_000],
        [b"\x93\xa5hello\x01"],
        [wire.encode_envelope(wire.Request(7, True))],
        [wire.encode_envelope(wire.Request(7, True)), b"no message"],
        [wire.encode_envelope(wire.Request(7, True)), msgspec.msgpack.encode({"type": "Fetch", "wroker": 1})],
        [wire.encode_envelope(wire.Welcome(1, "weight_sync", "x"))],
        [wire.encode_envelope(wire.Reply(1))],
        [b"x"] * 70_000,
    ],
    ids=lambda frames: f"{len(frames)} frames of {len(frames[0])}",
)
def test_a_malformed_frame_is_counted_answered_with_one_line_and_harms_nobody(frames, caplog):
    async def main():
        async with serving() as box, remote(lambda: box.address) as other:
            with Raw(box.address) as peer:
                await peer.greet()
                await peer.send(*frames)
                fault = await peer.receive()
                assert isinstance(fault, wire.Fault)
                assert fault.reason
                assert "\n" not in fault.reason
                assert box.refused_frames == 1
                assert await other.ask(fetch(5)) == NoNewer(5)
                await peer.ask(8, fetch())
                assert await peer.receive() == wire.Reply(8)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert len([line for line in caplog.messages if "refused frame" in line]) == 1


def test_a_flood_of_garbage_fills_no_log(caplog):
    async def main():
        async with serving() as box:
            with Raw(box.address) as peer:
                for _ in range(1500):
                    await peer.send(b"garbage")
                    await peer.receive()
            assert box.refused_frames == 1500

    with caplog.at_level(logging.WARNING):
        run(main())
    assert len(caplog.messages) == 11


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=4), min_size=30, max_size=60))
def test_no_frames_whatever_end_a_mailbox(messages):
    async def main():
        async with serving() as box:
            with Raw(box.address) as peer:
                for k, frames in enumerate(messages):
                    head = wire.encode_envelope(wire.Request(k, True))
                    await peer.send(*(frames if k % 2 else [head, *frames]))
                async with remote(lambda: box.address) as other:
                    assert await other.ask(fetch(1)) == NoNewer(1)

    run(main())


def test_an_error_of_the_protocol_goes_back_to_the_asker_and_the_service_lives():
    async def main():
        async with serving() as box, remote(lambda: box.address) as peer:
            with pytest.raises(PeerRefused, match="weight_sync: this ticket is revoked"):
                await peer.ask(Release("revoked", 1))
            assert await peer.ask(Release("x", 1)) == Released(True)

    run(main())


@pytest.mark.parametrize(("worker", "kind"), [("defect", ZeroDivisionError), ("invariant", InvariantError)])
def test_a_defect_of_a_handler_ends_the_mailbox(worker, kind):
    # field report 8: the task dies, its exception is swallowed, and everybody waits
    async def main():
        async with mailbox() as box:
            serve = asyncio.create_task(box.serve())
            async with remote(lambda: box.address) as peer:
                await peer.tell(Release(worker, 1))
                with pytest.raises(ExceptionGroup) as caught:
                    await serve
                assert caught.group_contains(kind)

    run(main())


def test_requests_that_wait_hold_up_nobody_and_end_with_the_mailbox():
    ended = []

    async def waits(request):
        try:
            return await echo(request)
        finally:
            ended.append(request.have)

    async def main():
        async with serving(waits) as box, remote(lambda: box.address) as peer:
            slow = asyncio.create_task(peer.ask(fetch(1, wait_s=500), wait_s=500))
            assert await peer.ask(fetch(2)) == NoNewer(2)
        assert ended == [2, 1]
        slow.cancel()

    run(main())


def test_a_peer_beyond_its_credit_is_told_and_others_are_served():
    async def main():
        async with serving() as box, remote(lambda: box.address) as other:
            with Raw(box.address) as peer:
                await peer.greet()
                for sequence in range(wire.CREDIT + 1):
                    await peer.ask(sequence, fetch(wait_s=500))
                fault = await peer.receive()
                assert (fault.sequence, fault.reason) == (
                    wire.CREDIT,
                    f"more than {wire.CREDIT} requests under way",
                )
                assert await other.ask(fetch(1)) == NoNewer(1)

    run(main())


def test_a_peer_that_takes_no_reply_holds_up_no_other():
    async def main():
        async with serving(high_water_mark=5) as box, remote(lambda: box.address) as other:
            with Raw(box.address) as deaf:
                await deaf.greet()
                for sequence in range(2000):
                    await deaf.ask(sequence, fetch())
                for k in range(50):
                    assert await other.ask(fetch(k)) == NoNewer(k)

    run(main())


async def bulky(request):
    return Rejected("x" * 10_000)  # 2,000 of them fill every queue on their way


def test_two_thousand_replies_to_a_peer_that_reads_late_all_arrive():
    # field report 55: a ROUTER with a high-water mark of 5 drops silently when a peer's pipe is full
    async def main():
        async with serving(bulky, high_water_mark=5) as box:
            with Raw(box.address, high_water_mark=5) as peer:
                await peer.greet()
                for sequence in range(2000):
                    await peer.ask(sequence, fetch())
                answers = [await peer.receive() for _ in range(2000)]
        assert sorted(answer.sequence for answer in answers) == list(range(2000))
        assert all(isinstance(answer, wire.Reply) for answer in answers)

    run(main())


def test_a_reply_that_a_peer_does_not_take_is_a_line_in_the_log(monkeypatch, caplog):
    # field report 55: or the sender is told
    monkeypatch.setattr(mailbox_module, "SEND_S", 0.2)

    async def main():
        async with serving(bulky, high_water_mark=5) as box:
            with Raw(box.address, high_water_mark=5) as deaf:
                await deaf.greet()
                for sequence in range(2000):
                    await deaf.ask(sequence, fetch())
                await until(lambda: "raw took no reply for 0.2 s; dropped" in caplog.text)

    with caplog.at_level(logging.WARNING):
        run(main())


def test_a_port_in_use_is_one_clear_line_that_names_the_setting():
    async def main():
        async with mailbox() as first:
            with pytest.raises(UserError) as caught:
                async with mailbox(address=first.address):
                    pass
            assert str(caught.value) == f"services.weight_sync = '{first.address}': Address already in use"

    run(main())


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5701",
        "tcp://*:5701",
        "tcp://10.1.2.3:5701",
        "tcp://[::]:5701",
        "tcp://example.org:5701",
    ],
)
def test_an_address_that_others_can_reach_is_refused(address):
    with pytest.raises(UserError, match="loopback only"):
        refuse_public(address)

    async def main():
        async with mailbox(address=address):
            pass

    with pytest.raises(UserError, match="loopback only"):
        run(main())


@pytest.mark.parametrize("address", ["127.0.0.1:5701", "tcp://127.0.0.1", "http://127.0.0.1:1", "tcp://127.0.0.1:1;x"])
def test_what_is_no_address_is_said_so(address):
    with pytest.raises(UserError, match="is no address"):
        refuse_public(address)


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://127.0.0.2:*"])
def test_loopback_addresses_are_served(address):
    async def main():
        async with serving(address=address) as box, remote(lambda: box.address) as peer:
            assert await peer.ask(fetch(3)) == NoNewer(3)

    run(main())


def test_a_handler_slower_than_the_deadline_is_named():
    async def main():
        async with serving() as box, remote(lambda: box.address, ask_s=0.3) as peer:
            with pytest.raises(DeadlineExceeded, match=r"weight_sync to Fetch did not come .*services.ask_s = 0.3"):
                await peer.ask(fetch(wait_s=500))
            assert await peer.ask(fetch(1)) == NoNewer(1)

    run(main())
