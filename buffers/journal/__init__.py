"""The redo log: what happened to the buffer, on disk before anybody is told of it.

record.py     one record: head, checksum, payload                                (pure)
batch.py      what one append writes, and what is found of it again              (pure)
segment.py    the files
disk.py       the writing side: group commit, limits, what is kept
archive.py    the reading side, of a run that is over or goes on: events, draws, trajectories
memory.py     the journal of a run that keeps none
"""

from collections.abc import Sequence
from typing import Protocol

from async_rl.buffers import events
from async_rl.buffers.store import Store


class Journal(Store, Protocol):
    async def append(self, happened: Sequence[events.Any]) -> None:
        """Returns when `happened`, and all that was put and appended before, is durable. Calls are in the order
        in which the events were applied, each right after that; `happened` may be empty. JournalFull where there
        is no room."""
        ...

    async def close(self) -> None: ...

    def footprint(self) -> dict[str, int]:
        """Bytes by where they are."""
        ...
