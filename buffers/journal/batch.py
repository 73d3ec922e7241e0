"""What one append writes, and what is found of it again. Pure.

    segment:  SNAPSHOT(n) SNAPSHOT(n) batch n, batch n + 1, ...
    batch:    (TRAJECTORY | DRAW)* EVENTS(n) EVENTS(n)

The events of a batch and the snapshot are there twice: no single damage costs one of them. A batch counts as
written once one copy of its events is whole. Batches are numbered from 1 on, over all segments.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from async_rl.actor.wire import Codec, Frame
from async_rl.buffers import events
from async_rl.buffers.group import Place
from async_rl.buffers.journal import record
from async_rl.buffers.journal.record import Kind, Part, Record
from async_rl.errors import JournalDamaged

FIRST = 1  # number of a journal's first batch


class Chunk(Struct):
    """What is written to one segment in one go."""

    segment: int
    begins: bool  # the segment begins with it
    lowest: int | None = None  # once it is durable, segments below this one are wanted no more
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0


class Tail:
    """The end of the journal, as it will be when all that was gathered is written."""

    def __init__(self, segment: int, number: int, snapshot: bytes, lowest: int | None) -> None:
        self.number = number  # of the batch that is gathered
        self._encode = Codec(list[events.Any]).encode
        self._events: list[events.Any] = []
        self._loose = False  # trajectories or draws whose batch has no events yet
        self._chunks: list[Chunk] = []
        self._begin(segment, snapshot, lowest)

    @property
    def segment(self) -> int:
        return self._chunk.segment

    @property
    def empty(self) -> bool:
        """Nothing is gathered."""
        return not (self._chunks or self._events or self._loose)

    def fuller_than(self, nbytes: int) -> bool:
        """Whether the segment is, and holds more than its snapshot weighs."""
        return self.end > max(nbytes, 2 * self._beginning)

    def add(self, kind: Kind, frames: Sequence[Frame]) -> Place:
        """A trajectory or a draw; its place is known before it is written."""
        self._loose = True
        return self._put(kind, frames)

    def happened(self, new: Iterable[events.Any]) -> None:
        self._events.extend(new)

    def roll(self, snapshot: bytes, lowest: int | None) -> None:
        """The batch ends here; what follows goes into the next segment. `snapshot`: of the state right now."""
        self._seal()
        self._begin(self.segment + 1, snapshot, lowest)

    def take(self) -> list[Chunk]:
        """What was gathered, in the order in which it is to be written."""
        self._seal()
        taken, self._chunks = self._chunks, []
        self._chunk = Chunk(self.segment, begins=False)
        return taken

    def _begin(self, segment: int, snapshot: bytes, lowest: int | None) -> None:
        self._chunk, self.end = Chunk(segment, begins=True, lowest=lowest), 0
        for _ in range(2):
            self._put(Kind.SNAPSHOT, [snapshot])
        self._beginning = self.end

    def _seal(self) -> None:
        if self._events or self._loose:
            frames = self._encode(self._events)
            for _ in range(2):
                self._put(Kind.EVENTS, frames)
            self._events, self._loose = [], False
            self.number += 1

    def _put(self, kind: Kind, frames: Sequence[Frame]) -> Place:
        chunk, offset = self._chunk, self.end
        parts, nbytes = record.encode(kind, chunk.segment, self.number, offset, time.time(), frames)
        if not chunk.parts:
            self._chunks.append(chunk)
        chunk.parts += parts
        chunk.nbytes += nbytes
        self.end += nbytes
        return Place(chunk.segment, offset, nbytes)


class Batch(NamedTuple):
    """One that was found."""

    number: int
    time: float  # unix, when it was written
    frames: list[memoryview]  # of its events


def snapshot(records: Iterable[Record]) -> Record | None:
    """The first whole one; None where there is none."""
    return next((found for found in records if found.kind == Kind.SNAPSHOT), None)


class Reader:
    """Follows the batches of a journal, segment by segment, and sees that none is missing."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the next batch
        self.rest = 0  # bytes behind the last whole record of the newest segment that tells something

    def batches(self, name: str, data: bytes, segment: int) -> Iterator[Batch]:
        """Those of a segment. name: of its file. JournalDamaged where one is missing, or nothing can be read."""
        end, told = 0, False
        for found in record.scan(data, segment):
            if found.kind not in (Kind.SNAPSHOT, Kind.EVENTS):
                continue
            if found.number > self.number:
                where = f"bytes {end} to {found.start}" if found.start else "the last bytes of the segment before it"
                raise JournalDamaged(
                    f"{name}: {where} are not those that were written; what happened in batches {self.number} to "
                    f"{found.number - 1} cannot be had again"
                )
            end, told = found.end, True
            if found.kind == Kind.EVENTS and found.number == self.number:
                self.number += 1
                yield Batch(found.number, found.time, found.frames)
        if not told:
            raise JournalDamaged(f"{name}: none of its {len(data)} bytes can be read; what happened then is lost")
        self.rest = len(data) - end
