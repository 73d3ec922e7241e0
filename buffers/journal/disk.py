"""The journal of a run on disk, the writing side.

Group commit: a thread writes and syncs what has gathered while it was busy with the batch before. Each opening
begins a new segment, with the state as it then is; so does a segment that is full and, where only what the
checkpoints need is kept, each checkpoint.
"""

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.actor.wire import Codec, Frame
from async_rl.buffers import events
from async_rl.buffers.group import Place
from async_rl.buffers.journal import archive
from async_rl.buffers.journal.batch import FIRST, Chunk, Tail
from async_rl.buffers.journal.record import Kind
from async_rl.buffers.journal.segment import Segments, append
from async_rl.buffers.settings import Settings
from async_rl.buffers.snapshot import freeze
from async_rl.buffers.state import State, new_state
from async_rl.buffers.store import KeptDraw
from async_rl.config import schema
from async_rl.errors import JournalFull
from async_rl.trajectory import Trajectory

INLINE_BYTES = 256  # of an array that is copied; a buffer of its own costs a write less than that, a message more
log = logging.getLogger(__name__)


class DiskJournal:
    """`open` gives the journal and the state that it holds; one process at a time may have it open.

    The state is looked at in `append`, and must then be as it is after what is appended.
    """

    def __init__(self, segments: Segments, state: State, segment: int, number: int, limits: schema.Journal) -> None:
        self._segments, self._state, self._limits = segments, state, limits
        self._encode_trajectory, self._encode_draw = Codec(Trajectory, INLINE_BYTES).encode, Codec(KeptDraw).encode
        self._tail = Tail(segment, number, freeze(state), self._lowest(segment))
        self._recent = _Recent(limits.cache_bytes)
        self._file: int | None = None  # the segment that is written to
        self._nbytes = segments.nbytes()
        self._writing: asyncio.Task[None] | None = None  # the newest batch
        self._open = False  # it still takes what is appended

    @classmethod
    def open(cls, folder: Path, settings: Settings, limits: schema.Journal) -> tuple["DiskJournal", State]:
        """A new run begins under `settings`, any other goes on with those it has. JournalDamaged where the state
        cannot be had again, JournalFull where there is no room to go on."""
        folder.mkdir(parents=True, exist_ok=True)
        segments = Segments(folder)
        if segments.numbers():
            state, newest, number, rest = archive.recover(segments)
            if rest:
                log.warning(
                    "%s: its last %d bytes, a write that was never finished, are left out", segments.path(newest), rest
                )
        else:
            state, newest, number = new_state(settings), 0, FIRST
        journal = cls(segments, state, newest + 1, number, limits)
        journal._write(journal._tail.take())
        return journal, state

    # --- the store -----------------------------------------------------------------------------------

    def put(self, group: int, member: int, trajectory: Trajectory) -> Place:
        return self._put(Kind.TRAJECTORY, self._encode_trajectory(trajectory), trajectory)

    def put_draw(self, draw: KeptDraw) -> Place:
        return self._put(Kind.DRAW, self._encode_draw(draw), draw)

    def get(self, place: Place) -> Trajectory:
        recent = self._recent.get(place)
        return recent if isinstance(recent, Trajectory) else self._segments.trajectory(place)

    def get_draw(self, place: Place) -> KeptDraw:
        recent = self._recent.get(place)
        return recent if isinstance(recent, KeptDraw) else self._segments.draw(place)

    def _put(self, kind: Kind, frames: Sequence[Frame], content: Trajectory | KeptDraw) -> Place:
        place = self._tail.add(kind, frames)
        self._recent.add(place, content)
        return place

    # --- the log -------------------------------------------------------------------------------------

    async def append(self, happened: Sequence[events.Any]) -> None:
        self._tail.happened(happened)
        if self._is_over(happened):
            self._tail.roll(freeze(self._state), self._lowest(self._tail.segment + 1))
        if not self._open and not self._tail.empty:
            self._open = True
            self._writing = asyncio.create_task(self._commit(self._writing), name="journal commit")
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        try:
            await self.append([])
        finally:
            self._segments.close()
            if self._file is not None:
                os.close(self._file)

    def footprint(self) -> dict[str, int]:
        return {"journal_bytes": self._nbytes, "cache_bytes": self._recent.nbytes}

    def _is_over(self, happened: Sequence[events.Any]) -> bool:
        """Whether the segment is to end with the batch that is gathered."""
        checkpoint = self._limits.keep == "checkpoint" and any(isinstance(e, events.Checkpointed) for e in happened)
        return checkpoint or self._tail.fuller_than(self._limits.segment_bytes)

    def _lowest(self, begun: int) -> int | None:
        """The first segment that is kept once `begun` is durable; None: all are."""
        return min([begun, *_named(self._state)]) if self._limits.keep == "checkpoint" else None

    async def _commit(self, before: "asyncio.Task[None] | None") -> None:
        """Write all that gathers until the batch before is durable. After a failure nothing is written."""
        if before is not None:
            await asyncio.shield(before)
        self._open = False
        batch, end = self._tail.take(), (self._tail.segment, self._tail.end)
        await asyncio.to_thread(self._write, batch)
        self._recent.trim(end)
        for lowest in [chunk.lowest for chunk in batch if chunk.lowest is not None]:
            self._segments.close_below(lowest)

    def _write(self, batch: list[Chunk]) -> None:
        for chunk in batch:
            path = self._segments.path(chunk.segment)
            if self._nbytes + chunk.nbytes > self._limits.max_bytes:
                raise JournalFull(
                    f"{path}: {chunk.nbytes} bytes more than the journal's {self._nbytes} exceed journal.max_bytes = "
                    f"{self._limits.max_bytes}"
                )
            try:
                self._write_chunk(chunk)
            except OSError as error:
                raise JournalFull(
                    f"{path}: cannot be written, after {self._nbytes} bytes of journal: {error.strerror}"
                ) from None

    def _write_chunk(self, chunk: Chunk) -> None:
        if chunk.begins:
            before, self._file = self._file, self._segments.begin(chunk.segment, chunk.parts)
            if before is not None:
                os.close(before)
        else:
            assert self._file is not None
            append(self._file, chunk.parts)
        self._nbytes += chunk.nbytes
        if chunk.lowest is not None:
            self._nbytes -= self._segments.remove_below(chunk.lowest)


class _Recent:
    """What was put last. All that is not durable yet; beyond that, as much as `limit` bytes hold."""

    def __init__(self, limit: int) -> None:
        self._limit, self.nbytes = limit, 0
        self._content: OrderedDict[Place, Trajectory | KeptDraw] = OrderedDict()  # in the order of their places

    def add(self, place: Place, content: Trajectory | KeptDraw) -> None:
        self._content[place] = content
        self.nbytes += place.nbytes

    def get(self, place: Place) -> Trajectory | KeptDraw | None:
        return self._content.get(place)

    def trim(self, durable: tuple[int, int]) -> None:
        """durable: segment and offset that all before is durable."""
        while self.nbytes > self._limit:
            oldest = next(iter(self._content))
            if (oldest.segment, oldest.offset) >= durable:
                return
            del self._content[oldest]
            self.nbytes -= oldest.nbytes


def _named(state: State) -> Iterator[int]:
    """The segments that something which the state names lies in."""
    for pool in (state.training, state.held_out):
        for group in pool.groups.values():
            yield from (outline.place.segment for outline in group.trajectories.values())
    for kept in state.draws.values():
        yield from (kept.place.segment, kept.lowest)
    if state.batch is not None:
        yield state.batch.place.segment
        for group in state.batch.groups:
            yield from (outline.place.segment for outline in group.trajectories.values())
