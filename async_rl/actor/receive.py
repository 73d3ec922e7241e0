"""Messages taken off a socket in bursts: one turn of the event loop for many of them, never all of them."""

import asyncio
import contextlib

import zmq
import zmq.asyncio

BURST = 32


class Receiver:
    """The messages of `socket`; nobody else receives on it."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._next: asyncio.Future[list[zmq.Frame]] | None = None

    async def burst(self, wait_s: float | None = None) -> list[list[zmq.Frame]]:
        """What has arrived, BURST messages at most. Waits for the first, for `wait_s` at most where that is given;
        empty then. A message is never lost to the end of the wait."""
        first = self._next or asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        self._next = first
        if not first.done():
            await asyncio.wait({first}, timeout=wait_s)
            if not first.done():
                return []
        self._next = None
        messages = [first.result()]
        with contextlib.suppress(zmq.Again):
            while len(messages) < BURST:
                messages.append(await self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        return messages
