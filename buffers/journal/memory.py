"""The journal of a run that keeps none."""

from collections import Counter
from collections.abc import Sequence

from async_rl.buffers import events
from async_rl.buffers.store import MemoryStore


class MemoryJournal(MemoryStore):
    """Durable as long as the process lives: counts the events by kind and keeps none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    async def append(self, happened: Sequence[events.Any]) -> None:
        self.counts.update(type(event).__name__ for event in happened)

    async def close(self) -> None:
        """Nothing to close."""

    def footprint(self) -> dict[str, int]:
        return {}
