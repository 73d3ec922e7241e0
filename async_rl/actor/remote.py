"""The asking side of an actor: one connection to another service's mailbox.

Nothing is sent before the greeting was answered, so no first message is lost. Heartbeats find a peer that is
gone; the connection is then made anew, at the address that the peer has now, and what is unanswered is sent
again. Every request of the protocol is idempotent, so a repeat does no harm.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from async_rl.actor import wire
from async_rl.actor.receive import Receiver
from async_rl.errors import AsyncRLError, DeadlineExceeded, PeerRefused, WireError
from async_rl.protocol import SCHEMA

MISSED_HEARTBEATS = 5
LINGER_S = 0.2
log = logging.getLogger(__name__)

Resolve = Callable[[], str | None]
"""Where the service is now, or None while nobody has announced it."""


class Remote:
    """`async with Remote(...) as buffer: reply = await buffer.ask(Acquire(...))`.

    resolve: asked at each (re)connection for the address.
    sender: the name of the asking service, for the other side's log.
    connect_s, ask_s, heartbeat_s: `services.connect_s`, `services.ask_s`, `services.heartbeat_s`.
    run: of which run the asker is; "" where it does not matter.
    """

    def __init__(
        self,
        service: str,
        resolve: Resolve,
        requests: Any,
        replies: Any,
        *,
        sender: str,
        connect_s: float,
        ask_s: float,
        heartbeat_s: float,
        run: str = "",
        high_water_mark: int = wire.HIGH_WATER_MARK,
    ) -> None:
        self.service = service
        self._resolve = resolve
        self._sender = sender
        self._connect_s, self._ask_s, self._heartbeat_s = connect_s, ask_s, heartbeat_s
        self._hello = wire.encode_envelope(wire.Hello(SCHEMA, service, sender, run))
        self._high_water_mark = high_water_mark
        self._encode = wire.Codec(requests).encode
        self._decode = wire.Codec(replies).decode
        self._sequence = 0
        self._pending: dict[int, asyncio.Future[list[zmq.Frame] | None]] = {}  # None: the link was lost
        self._credit = asyncio.Semaphore(wire.CREDIT)
        self._telling: set[asyncio.Task[None]] = set()
        self._link: _Link | None = None
        self._changed = asyncio.Event()  # there is a link, or a failure
        self._failure: AsyncRLError | None = None  # for good
        self._refusal = ""  # why the peer at the address of now does not serve us
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> "Remote":
        self._task = asyncio.create_task(self._keep_connected(), name=f"{self._sender} -> {self.service}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling:
            await asyncio.wait(self._telling, timeout=LINGER_S)
        tasks = [self._task, *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=int(LINGER_S * 1000))

    async def ask(self, message: Any, *, wait_s: float = 0.0) -> Any:
        """The reply to `message`; `wait_s` is how long the peer itself may take by the message's own word.

        Raises PeerRefused with the peer's reason, DeadlineExceeded naming the setting.
        """
        await self._connected()
        try:
            async with asyncio.timeout(self._ask_s + wait_s), self._credit:
                return await self._exchange(message, wants_reply=True)
        except TimeoutError:
            raise self._late(message, wait_s) from None

    async def tell(self, message: Any) -> None:
        """Send `message` and expect no reply; waits while CREDIT messages are not yet carried out.

        A refusal by the peer, or none of it carried out within `services.ask_s`, is a warning in the log.
        """
        await self._connected()
        try:
            async with asyncio.timeout(self._ask_s):
                await self._credit.acquire()
        except TimeoutError:
            raise self._late(message, 0.0) from None
        task = asyncio.create_task(self._tell(message), name=f"{self._sender} tells {self.service}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, message: Any) -> None:
        try:
            async with asyncio.timeout(self._ask_s):
                await self._exchange(message, wants_reply=False)
        except (TimeoutError, AsyncRLError) as error:
            log.warning("%s: %s did not reach %s: %s", self._sender, type(message).__name__, self.service, error)
        finally:
            self._credit.release()

    async def _exchange(self, message: Any, *, wants_reply: bool) -> Any:
        """Send `message` over the link of now, and over each link after it, until it is answered."""
        self._sequence += 1
        sequence = self._sequence
        frames = [wire.encode_envelope(wire.Request(sequence, wants_reply)), *self._encode(message)]
        body: list[zmq.Frame] | None = None
        try:
            while body is None:
                link = await self._next_link()
                answer = self._pending[sequence] = asyncio.get_running_loop().create_future()
                await link.send(frames)
                body = await answer
            return self._decode(body) if wants_reply else None
        finally:
            self._pending.pop(sequence, None)

    async def _connected(self) -> None:
        """Wait for the greeting, at most `services.connect_s`."""
        if self._link is not None:
            return
        try:
            async with asyncio.timeout(self._connect_s):
                await self._next_link()
        except TimeoutError:
            if self._refusal:
                raise PeerRefused(self._refusal) from None
            where = self._resolve() or "it has announced no address"
            missing = f"the greeting of {self.service} ({where})"
            raise DeadlineExceeded(missing, self._connect_s, "services.connect_s") from None

    async def _next_link(self) -> "_Link":
        while True:
            if self._failure is not None:
                raise self._failure
            if self._link is not None:
                return self._link
            await self._changed.wait()

    def _late(self, message: Any, wait_s: float) -> DeadlineExceeded:
        missing = f"the answer of {self.service} to {type(message).__name__}"
        if wait_s:
            missing += f", beyond the {wait_s:g} s that it may take,"
        if self._link is None:
            missing += " (the connection is lost)"
        return DeadlineExceeded(missing, self._ask_s, "services.ask_s")

    # --- the connection ------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        try:
            while True:
                address = self._resolve()
                if address is None:
                    await asyncio.sleep(0.05)
                    continue
                with self._context.socket(zmq.DEALER) as socket:
                    socket.linger = int(LINGER_S * 1000)
                    socket.set_hwm(self._high_water_mark)
                    socket.connect(address)
                    try:
                        await self._converse(socket)
                    finally:
                        self._lose_link()
        except AsyncRLError as error:
            self._fail(error)
        except Exception as error:  # whoever asks next is told: a connection never dies unseen
            log.exception("%s: the connection to %s failed", self._sender, self.service)
            self._fail(WireError(f"the connection to {self.service} failed: {type(error).__name__}: {error}"))

    async def _converse(self, socket: zmq.asyncio.Socket) -> None:
        """Greet, then receive until the peer is silent for MISSED_HEARTBEATS heartbeats, or refuses us."""
        await _post(socket, self._hello)
        receiver, silent = Receiver(socket), 0
        while silent < MISSED_HEARTBEATS:
            messages = await receiver.burst(self._heartbeat_s)
            if not messages:
                silent += 1
                await _post(socket, wire.encode_envelope(wire.Ping()))
                continue
            silent = 0
            for frames in messages:
                if not await self._receive(socket, frames):
                    return
            await asyncio.sleep(0)  # who is answered runs before the next burst
        if self._link is not None:
            log.warning("%s: %s is silent; connecting again", self._sender, self.service)

    async def _receive(self, socket: zmq.asyncio.Socket, frames: list[zmq.Frame]) -> bool:
        """False: this is not who was looked for."""
        try:
            envelope = wire.decode_envelope(frames[0])
        except WireError as error:
            log.warning("%s: a frame from %s: %s", self._sender, self.service, error)
            return True
        match envelope:
            case wire.Reply(sequence=sequence):
                self._settle(sequence, frames[1:])
            case wire.Fault(sequence=sequence, reason=reason):
                self._settle(sequence, PeerRefused(f"{self.service}: {reason}"))
            case wire.Welcome(incarnation=incarnation):
                self._lose_link()
                self._refusal = ""
                self._link = _Link(socket, incarnation)
                self._changed.set()
            case wire.Refusal(reason=reason, final=True):
                raise PeerRefused(reason)
            case wire.Refusal(reason=reason):  # a port that has passed to another service: look again
                if reason != self._refusal:
                    log.warning("%s: %s", self._sender, reason)
                self._refusal = reason
                await asyncio.sleep(self._heartbeat_s)
                return False
            case wire.Ungreeted():
                await self._greet_again(socket)
            case wire.Pong(incarnation=incarnation):
                if self._link is None or incarnation != self._link.incarnation:
                    await self._greet_again(socket)
            case _:
                log.warning("%s: %s sent a %s", self._sender, self.service, type(envelope).__name__)
        return True

    async def _greet_again(self, socket: zmq.asyncio.Socket) -> None:
        """The service was started anew at the same address, or a greeting was lost.

        What is unanswered goes out again after the welcome.
        """
        self._lose_link()
        await _post(socket, self._hello)

    def _settle(self, sequence: int, answer: list[zmq.Frame] | PeerRefused) -> None:
        reply = self._pending.get(sequence)
        if reply is None or reply.done():  # asked twice over two links, or given up
            if sequence < 0:
                log.warning("%s: %s", self._sender, answer)
            return
        if isinstance(answer, PeerRefused):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    def _lose_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.lost = True
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_result(None)
        if self._failure is None:
            self._changed.clear()

    def _fail(self, error: AsyncRLError) -> None:
        self._failure = error
        self._changed.set()


class _Link:
    """A greeted connection to one incarnation of the service; `lost`: it is of no more use."""

    def __init__(self, socket: zmq.asyncio.Socket, incarnation: str) -> None:
        self.incarnation, self.lost = incarnation, False
        self._socket = socket

    async def send(self, frames: list[wire.Frame]) -> None:
        """Hand the frames to ZeroMQ, waiting while its queue is full; returns early when the link is lost."""
        pause = 0.001
        while not self.lost:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)


async def _post(socket: zmq.asyncio.Socket, frame: bytes) -> None:
    """Send now or not at all: a greeting or a heartbeat that finds the queue full is not missed."""
    with contextlib.suppress(zmq.Again):
        await socket.send_multipart([frame], flags=zmq.NOBLOCK)
