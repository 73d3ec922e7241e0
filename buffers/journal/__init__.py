"""The redo log: what happened to the buffer, on disk before anybody is told of it.

record.py     one record: length, checksum, payload     (pure)
disk.py       one file of a run: group commit, limit, the events again
memory.py     the journal of a run that keeps none
"""

from collections.abc import Sequence
from typing import Protocol

from async_rl.buffers import events


class Journal(Protocol):
    async def append(self, happened: Sequence[events.Any]) -> None:
        """Returns when `happened`, and all that was appended before, is durable. Calls are in the order in
        which the events were applied; `happened` may be empty. JournalFull where there is no room."""
        ...

    async def close(self) -> None: ...
