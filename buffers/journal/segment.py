"""The files of a journal: runs/NAME/journal/00000001.log, 00000002.log, ...

A file appears whole, with a durable snapshot in it, and then only grows: nothing is overwritten or cut off, so
it can be read while a run goes on.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.actor.wire import Codec
from async_rl.buffers.group import Place
from async_rl.buffers.journal import record
from async_rl.buffers.journal.record import Kind, Part
from async_rl.buffers.store import KeptDraw
from async_rl.errors import JournalDamaged, WireError
from async_rl.rundir import make_durable
from async_rl.trajectory import Trajectory

_OPEN = 8  # files held open to read from
_PARTS = os.sysconf("SC_IOV_MAX")


class Segments:
    """Not for use by two threads at once, but for `begin` and `remove_below`, which one other thread may call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[int, int] = {}  # to read from, the one opened last at the end
        self._trajectories, self._draws = Codec(Trajectory), Codec(KeptDraw)

    def numbers(self) -> list[int]:
        """Of the segments there are, oldest first; empty where there is no journal."""
        return sorted(int(path.stem) for path in self.folder.glob("*.log") if path.stem.isdecimal())

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:08}.log"

    def nbytes(self) -> int:
        return sum(self.path(segment).stat().st_size for segment in self.numbers())

    # --- reading -------------------------------------------------------------------------------------

    def load(self, segment: int) -> bytes:
        """All of it, as far as it is written; JournalDamaged where it cannot be read."""
        try:
            return self.path(segment).read_bytes()
        except OSError as error:
            raise self._unreadable(segment, error) from None

    def trajectory(self, place: Place) -> Trajectory:
        """JournalDamaged where the bytes are not those that were written."""
        found: Trajectory = self._content(place, Kind.TRAJECTORY, self._trajectories)
        return found

    def draw(self, place: Place) -> KeptDraw:
        found: KeptDraw = self._content(place, Kind.DRAW, self._draws)
        return found

    def _content(self, place: Place, kind: Kind, codec: Codec) -> Any:
        try:
            data = memoryview(os.pread(self._file(place.segment), place.nbytes, place.offset))
        except OSError as error:
            raise self._unreadable(place.segment, error) from None
        found = record.read(data, place.segment, place.offset, base=place.offset)
        if found is None or found.kind != kind:
            raise JournalDamaged(
                f"{self.path(place.segment)}: bytes {place.offset} to {place.offset + place.nbytes} are not those "
                "that were written"
            )
        try:
            return codec.decode(found.frames)
        except WireError as error:
            raise JournalDamaged(f"{self.path(place.segment)}: byte {place.offset}: {error}") from None

    def _file(self, segment: int) -> int:
        file = self._files.pop(segment, None)
        if file is None:
            file = os.open(self.path(segment), os.O_RDONLY)
        self._files[segment] = file
        if len(self._files) > _OPEN:
            os.close(self._files.pop(next(iter(self._files))))
        return file

    def _unreadable(self, segment: int, error: OSError) -> JournalDamaged:
        if isinstance(error, FileNotFoundError):
            why = 'is gone; journal.keep = "checkpoint" deletes what no checkpoint needs'
        else:
            why = f"cannot be read: {error.strerror}"
        return JournalDamaged(f"{self.path(segment)}: {why}")

    def close_below(self, lowest: int) -> None:
        """Lets go of deleted segments, whose room is free only then."""
        for segment in [segment for segment in self._files if segment < lowest]:
            os.close(self._files.pop(segment))

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    # --- writing -------------------------------------------------------------------------------------

    def begin(self, segment: int, parts: Sequence[Part]) -> int:
        """A new segment, durable once this returns the file, which further parts are appended to. OSError."""
        path = self.path(segment)
        unfinished = path.with_suffix(".new")  # a crash may have left one
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            append(file, parts)
            unfinished.rename(path)
            make_durable(self.folder)
        except BaseException:
            os.close(file)
            raise
        return file

    def remove_below(self, lowest: int) -> int:
        """Deletes the segments before `lowest`, oldest first; how many bytes that frees. OSError."""
        freed = 0
        for path in [self.path(segment) for segment in self.numbers() if segment < lowest]:
            freed += path.stat().st_size
            path.unlink()
        if freed:
            make_durable(self.folder)
        return freed


def append(file: int, parts: Sequence[Part]) -> None:
    """Durable once it returns. What one call leaves unwritten goes into the next. OSError."""
    left: list[Part] = [part for part in parts if len(part)]
    first = 0
    while first < len(left):
        written = os.writev(file, left[first : first + _PARTS])
        while first < len(left) and written >= len(left[first]):
            written -= len(left[first])
            first += 1
        if written:
            left[first] = memoryview(left[first])[written:]
    os.fdatasync(file)
