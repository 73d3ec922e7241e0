"""Requests that wait for work, woken one at a time: with a thousand workers most changes concern one of them.

    with line.place(wants) as place:      # before the attempt, so that no change is missed
        ... the attempt fails ...
        await place.wait(5.0)

`wake` begins a wave: the first in line has its turn. Where that changes something, the change begins the next
wave; else the turn is passed on to those who ask for more in anything, since the others would fail, too.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

Wants = tuple[int, int]
"""(weights that a worker has, trajectories that it asks for)."""


class Place:
    def __init__(self, number: int, wants: Wants, owner: str) -> None:
        self.number, self.wants, self.owner = number, wants, owner
        self.turn = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until its turn, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.turn.wait()

    def asks_no_more_than(self, failed: Wants) -> bool:
        return self.wants[0] <= failed[0] and self.wants[1] <= failed[1]


class Line:
    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # in the order in which they came; without those that had their turn
        self._numbers = itertools.count()
        self._wave = 0  # places from this number on came after the last change

    @contextlib.contextmanager
    def place(self, wants: Wants = (0, 0), owner: str = "") -> Iterator[Place]:
        place = Place(next(self._numbers), wants, owner)
        self._places[place.number] = place
        try:
            yield place
        finally:
            self._places.pop(place.number, None)

    def wake(self) -> None:
        """Something changed."""
        self._wave = next(self._numbers)
        self.pass_on(None)

    def pass_on(self, failed: Wants | None) -> None:
        """Who had the turn got nothing; it asked for `failed` and others who ask for no more need not try."""
        for place in self._places.values():
            if place.number > self._wave:
                return
            if failed is None or not place.asks_no_more_than(failed):
                del self._places[place.number]
                place.turn.set()
                return

    def call(self, owner: str) -> None:
        """Whatever changed, those of `owner` have their turn."""
        for place in [place for place in self._places.values() if place.owner == owner]:
            del self._places[place.number]
            place.turn.set()

    def wake_all(self) -> None:
        for place in self._places.values():
            place.turn.set()
        self._places.clear()
