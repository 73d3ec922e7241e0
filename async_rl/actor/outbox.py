"""Results that are done while others are on their way go out together: one message at a time, never delayed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MOST = 64  # results in one message
MOST_BYTES = 16 * 2**20  # of all results in one message, where there is more than one
Result = TypeVar("Result")
Reply = TypeVar("Reply")


class Outbox(Generic[Result, Reply]):
    """send: takes results and gives a reply to each, in their order; what it raises reaches all who handed in.
    weigh: bytes of a result."""

    def __init__(
        self, send: Callable[[list[Result]], Awaitable[list[Reply]]], weigh: Callable[[Result], int] = lambda _: 0
    ) -> None:
        self._send, self._weigh = send, weigh
        self._waiting: list[tuple[Result, asyncio.Future[Reply]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def hand_in(self, result: Result) -> Reply:
        """The reply to `result`. Who is cancelled meanwhile takes nothing back."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, reply))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all(), name="outbox")
        return await reply

    async def _send_all(self) -> None:
        while self._waiting:
            batch = self._take()
            try:
                replies = await self._send([result for result, _ in batch])
                answered = list(zip(batch, replies, strict=True))
            except Exception as error:  # it belongs to those who wait for their replies
                for _, waiting in batch:
                    if not waiting.done():
                        waiting.set_exception(error)
                continue
            for (_, waiting), reply in answered:
                if not waiting.done():
                    waiting.set_result(reply)

    def _take(self) -> list[tuple[Result, asyncio.Future[Reply]]]:
        """Those of the next message, first come first."""
        count, nbytes = 0, 0
        for result, _ in self._waiting[:MOST]:
            nbytes += self._weigh(result)
            if count and nbytes > MOST_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
