"""The journal of a run on disk: runs/NAME/journal/events.

The first record holds the settings that the events were decided by, each further one an event. Group commit: a
thread writes and syncs what has gathered while it was busy with the batch before.
"""

import asyncio
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from async_rl.actor.wire import Codec
from async_rl.buffers import events
from async_rl.buffers.journal import record
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import State, new_state
from async_rl.errors import AsyncRLError, ConfigError, JournalDamaged, JournalFull, WireError

_PARTS = 512  # buffers of one write; the system takes 1024 at most
log = logging.getLogger(__name__)


class DiskJournal:
    """`open` gives the journal and the state that it holds; one process at a time may have it open."""

    def __init__(self, path: Path, file: int, size: int, max_bytes: int) -> None:
        self._path, self._file, self._size, self._max_bytes = path, file, size, max_bytes
        self._encode = Codec(events.Any).encode
        self._gathered: list[record.Part] = []
        self._writing: asyncio.Task[None] | None = None  # the newest batch
        self._open = False  # it still takes what is appended

    @classmethod
    def open(cls, folder: Path, settings: Settings, max_bytes: int) -> tuple["DiskJournal", State]:
        """JournalDamaged where the state cannot be had again, ConfigError where it was decided by others."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            state, size = recover(path, settings)
            torn = os.fstat(file).st_size - size
            if torn:
                log.warning("%s: cut off the last %d bytes, a write that was never finished", path, torn)
                os.ftruncate(file, size)
            journal = cls(path, file, size, max_bytes)
            if not size:
                journal._write(record.encode([msgspec.msgpack.encode(settings)]))
                _sync(folder)
        except BaseException:
            os.close(file)
            raise
        return journal, state

    async def append(self, happened: Sequence[events.Any]) -> None:
        for event in happened:
            self._gathered += record.encode(self._encode(event))
        if self._gathered and not self._open:
            self._open = True
            self._writing = asyncio.create_task(self._commit(self._writing), name="journal commit")
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _commit(self, before: "asyncio.Task[None] | None") -> None:
        """Write all that gathers until the batch before is durable. After a failure nothing is written."""
        if before is not None:
            await asyncio.shield(before)
        batch, self._gathered = self._gathered, []
        self._open = False
        await asyncio.to_thread(self._write, batch)

    async def close(self) -> None:
        try:
            await self.append([])
        finally:
            os.close(self._file)

    def _write(self, parts: list[record.Part]) -> None:
        total = sum(len(part) for part in parts)
        if self._size + total > self._max_bytes:
            raise JournalFull(
                f"{self._path}: {total} bytes more than its {self._size} exceed journal.max_bytes = {self._max_bytes}"
            )
        try:
            _write_all(self._file, parts)
            os.fdatasync(self._file)
        except OSError as error:
            raise JournalFull(f"{self._path}: cannot be written after {self._size} bytes: {error.strerror}") from None
        self._size += total


def recover(path: Path, settings: Settings) -> tuple[State, int]:
    """The state that the journal at `path` holds, and how many bytes of it are whole records."""
    state, end, decode = new_state(settings), 0, Codec(events.Any).decode
    try:
        for number, found in enumerate(record.scan(_mapped(path))):
            frames = [bytes(frame) for frame in found.frames]
            if number:
                state.apply(decode(frames))
            else:
                _require_same(path, msgspec.msgpack.decode(frames[0], type=Settings), settings)
            end = found.end
        state.check()
    except ConfigError:
        raise
    except (JournalDamaged, WireError, msgspec.DecodeError) as error:
        raise JournalDamaged(f"{path}: {error}; what the buffer held after byte {end} cannot be had again") from None
    except (AsyncRLError, KeyError, ValueError, AssertionError) as error:
        raise JournalDamaged(f"{path}: the event after byte {end} does not follow from those before: {error}") from None
    return state, end


def _mapped(path: Path) -> memoryview:
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _require_same(path: Path, old: Settings, new: Settings) -> None:
    for name in Settings.__struct_fields__:
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise ConfigError(
                f"{path}: written with {name} = {before}, now it is {now}; a run that is continued keeps its settings"
            )


def _write_all(file: int, parts: Sequence[record.Part]) -> None:
    """What one call leaves unwritten goes into the next."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.writev(file, left[:_PARTS])
        done = 0
        while done < len(left) and written >= left[done].nbytes:
            written -= left[done].nbytes
            done += 1
        del left[:done]
        if written:
            left[0] = left[0][written:]


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
