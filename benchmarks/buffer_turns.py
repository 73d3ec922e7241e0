"""Processes that do their parts of a measurement in turns, each part timed where it is done.

async def produce(turns, ...):
    async with turns.turn("put"):       # waits until it is called up; the body is what is timed
        ...

with Cast(producer=(produce, ...), consumer=(consume, ...)) as cast:
    put = cast.turn("producer", "put")  # seconds
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import uvloop

TURN_S = 300.0  # a turn that takes longer has failed
SPAWN = multiprocessing.get_context("spawn")


class Turns:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        asked = await asyncio.to_thread(self._connection.recv)
        if asked != name:
            raise ValueError(f"called up for {asked}, it would be the turn of {name}")
        began = time.monotonic()
        yield
        self._connection.send((began, time.monotonic()))


Role = tuple[Callable[..., Awaitable[None]], *tuple[Any, ...]]
"""What a process does, and what it is given after its turns."""


class Cast:
    def __init__(self, **roles: Role) -> None:
        self._roles = roles

    def __enter__(self) -> "Cast":
        self._connections: dict[str, Connection] = {}
        self._processes = []
        for name, (role, *given) in self._roles.items():
            self._connections[name], theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_play, args=(theirs, role, given), name=name)
            process.start()
            theirs.close()
            self._processes.append(process)
        return self

    def turn(self, who: str, name: str) -> float:
        """Has `who` do it now; the seconds it took."""
        self.call(who, name)
        began, ended = self.times(who)
        return ended - began

    def call(self, who: str, name: str) -> None:
        self._connections[who].send(name)

    def times(self, who: str) -> tuple[float, float]:
        """When the turn that `who` was called up for began and ended, by the clock of all processes."""
        connection = self._connections[who]
        if not connection.poll(TURN_S):
            raise TimeoutError(f"{who} is not done after {TURN_S:g} s")
        times: tuple[float, float] = connection.recv()
        return times

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.join(1.0)
            process.kill()
            process.join()


def _play(connection: Connection, role: Callable[..., Awaitable[None]], given: list[Any]) -> None:
    uvloop.run(role(Turns(connection), *given))


async def each(items: list[Any], under_way: int, call: Callable[[Any], Awaitable[Any]]) -> None:
    """`call` on all of `items`, so many at a time."""
    left = iter(items)

    async def work() -> None:
        for item in left:
            await call(item)

    await asyncio.gather(*[work() for _ in range(min(under_way, len(items)))])
