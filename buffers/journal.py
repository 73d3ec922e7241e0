"""The seam where events become durable. The service answers only after `append`."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from async_rl.buffers import events


class Journal(Protocol):
    async def append(self, happened: Sequence[events.Any]) -> None:
        """Returns when `happened`, and all that was appended before, is durable. Calls are in the order in
        which the events were applied; `happened` may be empty."""
        ...


class MemoryJournal:
    """Durable as long as the process lives: counts the events by kind and keeps none of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def append(self, happened: Sequence[events.Any]) -> None:
        self.counts.update(type(event).__name__ for event in happened)
