"""The receiving side of an actor: a ZeroMQ ROUTER that greets, answers and refuses.

Every request runs as a task of its own, so that one that waits (for a lease, a draw, new weights) holds up
nobody. Back-pressure is credit: a peer has at most CREDIT requests under way, and a reply goes only to who
asked. Malformed frames are counted, answered with the reason and dropped.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio

from async_rl.actor import wire
from async_rl.actor.receive import Receiver
from async_rl.errors import AsyncRLError, InvariantError, UserError, WireError
from async_rl.protocol import SCHEMA

MAX_FRAMES = 65_536
MAX_PEERS = 4096  # greetings remembered; a peer that was forgotten greets again
SEND_S = 10.0  # a peer that takes no reply for so long loses it: its own deadline tells it
LINGER_MS = 200  # the last replies may leave; nothing waits for longer

Handler = Callable[[Any], Awaitable[Any]]
log = logging.getLogger(__name__)


class Mailbox:
    """`async with Mailbox(...) as mailbox: await mailbox.serve()`.

    address: "tcp://127.0.0.1:5701"; port 0 or "" takes a free one, `address` then tells which.
    service: the kind of service, checked in the greeting; `services.SERVICE` is the setting of its address.
    handle: called with each request; what it returns is the reply. An AsyncRLError it raises goes back to the
        asker; anything else, a broken invariant too, ends `serve` with that error: a half-done request leaves
        a broken service.
    run: of which run this is; peers of another one are refused. "": any.
    """

    def __init__(
        self,
        address: str,
        service: str,
        requests: Any,
        replies: Any,
        handle: Handler,
        *,
        run: str = "",
        high_water_mark: int = wire.HIGH_WATER_MARK,
    ) -> None:
        self.address = (address or "tcp://127.0.0.1:0").replace("//localhost:", "//127.0.0.1:")
        self.service = service
        self.incarnation = uuid.uuid4().hex[:12]
        self.refused_frames = 0
        self._run = run
        self._high_water_mark = high_water_mark
        self._decode = wire.Codec(requests).decode
        self._encode = wire.Codec(replies).encode
        self._handle = handle
        self._greeted: dict[bytes, str] = {}
        self._under_way: dict[bytes, int] = {}
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> "Mailbox":
        refuse_public(self.address)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER_MS
        self._socket.set_hwm(self._high_water_mark)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"services.{self.service} = '{self.address}': {zmq.strerror(error.errno or 0)}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=LINGER_MS)

    async def serve(self) -> None:
        """Receive until cancelled, or until a handler fails; requests under way are cancelled then."""
        receiver = Receiver(self._socket)
        async with asyncio.TaskGroup() as tasks:
            while True:
                for frames in await receiver.burst():
                    await self._receive(frames[0].bytes, frames[1:], tasks)
                await asyncio.sleep(0)  # a full queue never keeps the tasks it feeds from running

    async def _receive(self, identity: bytes, frames: list[zmq.Frame], tasks: asyncio.TaskGroup) -> None:
        sequence = -1
        try:
            envelope = _open(frames)
            match envelope:
                case wire.Hello():
                    await self._post(identity, self._greet(identity, envelope))
                case wire.Ping():
                    await self._post(identity, wire.Pong(self.incarnation))
                case wire.Request() if identity not in self._greeted:
                    await self._post(identity, wire.Ungreeted())
                case wire.Request(sequence=sequence):
                    if self._under_way.get(identity, 0) >= wire.CREDIT:
                        raise WireError(f"more than {wire.CREDIT} requests under way")
                    message = self._decode(frames[1:])
                    self._under_way[identity] = self._under_way.get(identity, 0) + 1
                    name = f"{self.service} {type(message).__name__}"
                    tasks.create_task(self._answer(identity, envelope, message), name=name)
                case _:
                    raise WireError(f"{type(envelope).__name__} is nothing to send to a mailbox")
        except WireError as error:
            self.refused_frames += 1
            if self.refused_frames <= 10 or self.refused_frames % 1000 == 0:  # a flood fills no disk
                who = self._greeted.get(identity, f"peer {identity.hex()[:10]}")
                log.warning("%s: refused frame %d, from %s: %s", self.service, self.refused_frames, who, error)
            await self._post(identity, wire.Fault(sequence, str(error)))

    def _greet(self, identity: bytes, hello: wire.Hello) -> wire.Welcome | wire.Refusal:
        if hello.schema != SCHEMA:
            ours = f"{self.service} speaks message schema {SCHEMA}, {hello.sender} speaks {hello.schema}"
            return wire.Refusal(f"{ours}: install the same version of async-rl for both", True)
        if hello.service != self.service:
            return wire.Refusal(f"{self.address} is the service {self.service}, not {hello.service}", False)
        if self._run and hello.run and hello.run != self._run:
            return wire.Refusal(f"{self.address} belongs to the run {self._run}, not to {hello.run}", False)
        self._greeted[identity] = " ".join(hello.sender.split())[:80]
        if len(self._greeted) > MAX_PEERS:
            del self._greeted[next(iter(self._greeted))]
        return wire.Welcome(SCHEMA, self.service, self.incarnation)

    async def _answer(self, identity: bytes, request: wire.Request, message: Any) -> None:
        try:
            reply = await self._handle(message)
            body = self._encode(reply) if request.wants_reply else []
            frames = [wire.encode_envelope(wire.Reply(request.sequence)), *body]
        except InvariantError:
            raise
        except AsyncRLError as error:
            frames = [wire.encode_envelope(wire.Fault(request.sequence, str(error)))]
        finally:
            left = self._under_way[identity] - 1
            if left:
                self._under_way[identity] = left
            else:
                del self._under_way[identity]
        await self._send(identity, frames)

    async def _post(self, identity: bytes, envelope: wire.Envelope) -> None:
        """Send now or not at all: a peer that takes nothing must not hold up the others."""
        await self._try_send(identity, [wire.encode_envelope(envelope)])

    async def _send(self, identity: bytes, frames: list[wire.Frame]) -> None:
        """Send, waiting while the peer's pipe is full."""
        pause, waited = 0.001, 0.0
        while not await self._try_send(identity, frames):
            if waited >= SEND_S:
                who = self._greeted.get(identity, identity.hex()[:10])
                log.warning("%s: %s took no reply for %g s; dropped", self.service, who, SEND_S)
                return
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 0.05)

    async def _try_send(self, identity: bytes, frames: list[wire.Frame]) -> bool:
        """False where the peer's pipe is full. A peer that is gone is forgotten.

        ROUTER_MANDATORY makes both visible: without it ZeroMQ drops the message silently.
        """
        try:
            await self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._greeted.pop(identity, None)
        return True


def refuse_public(address: str) -> None:
    """UserError for an address that other machines can reach: there is no encryption to protect it."""
    if address.startswith(("inproc://", "ipc://")):
        return
    parts = re.fullmatch(r"tcp://(?P<host>[^;]+):(?P<port>\d+|\*)", address)
    if parts is None:
        raise UserError(f"'{address}' is no address; write tcp://127.0.0.1:PORT")
    if parts["host"] != "localhost" and not re.fullmatch(r"127(\.\d{1,3}){3}", parts["host"]):
        raise UserError(
            f"{address}: services bind to loopback only, since messages are not encrypted; use tcp://127.0.0.1:PORT"
        )


def _open(frames: list[zmq.Frame]) -> wire.Envelope:
    if not frames:
        raise WireError("an empty message")
    if len(frames) > MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, more than {MAX_FRAMES}")
    return wire.decode_envelope(frames[0])
