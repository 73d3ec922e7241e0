"""The reading side of a journal: of a run that is over, or goes on, or is about to."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from async_rl.actor.wire import Codec
from async_rl.buffers import events, snapshot
from async_rl.buffers.group import Place
from async_rl.buffers.journal import batch, record
from async_rl.buffers.journal.segment import Segments
from async_rl.buffers.state import State
from async_rl.buffers.store import KeptDraw
from async_rl.errors import AsyncRLError, JournalDamaged, UserError, WireError
from async_rl.trajectory import Trajectory

log = logging.getLogger(__name__)


class Archive:
    """Changes nothing. What happened since it was opened is in it too; what an unfinished write left is not.

    UserError where there is no journal; JournalDamaged, from any method, for what cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._segments = Segments(folder)
        numbers = self._segments.numbers()
        if not numbers:
            raise UserError(f"{folder}: no journal is there; a run keeps one unless journal.enabled = false")
        self._oldest = numbers[0]

    def first_state(self) -> State:
        """The state before all of `events()`."""
        return self._first().state

    def events(self) -> Iterator[tuple[float, events.Any]]:
        """All that is left of what happened, oldest first, each with its unix time."""
        numbers = [segment for segment in self._segments.numbers() if segment >= self._oldest]
        for found in _batches(self._segments, numbers, batch.Reader(self._first().number)):
            for event in found.events:
                yield found.time, event

    def state(self) -> State:
        """The state now."""
        return recover(self._segments).state

    def draws(self) -> dict[int, Place]:
        """Of each draw, by its first step, whose trajectories are still there: the place of its KeptDraw."""
        kept = {step: (old.place, old.lowest) for step, old in self.first_state().draws.items()}
        for _, event in self.events():
            if isinstance(event, events.Drawn):
                kept[event.step] = event.place, event.lowest
        return {step: place for step, (place, lowest) in sorted(kept.items()) if lowest >= self._oldest}

    def get(self, place: Place) -> Trajectory:
        return self._segments.trajectory(place)

    def get_draw(self, place: Place) -> KeptDraw:
        return self._segments.draw(place)

    def close(self) -> None:
        self._segments.close()

    def _first(self) -> "_Snapshot":
        first = _snapshot(self._segments, self._oldest)
        if first is None:
            path = self._segments.path(self._oldest)
            raise JournalDamaged(f"{path}: both copies of the state it begins with are damaged")
        return first


class Recovered(NamedTuple):
    state: State
    segment: int  # the newest
    number: int  # of the next batch
    unread: int  # bytes that a write left unfinished at the end of the newest segment


class _Snapshot(NamedTuple):
    state: State
    number: int  # of the batch that it stands before


class _Found(NamedTuple):
    number: int
    time: float
    events: list[events.Any]


def recover(segments: Segments) -> Recovered:
    """From the newest segment whose snapshot is whole; there must be one. JournalDamaged where the state cannot
    be had again."""
    numbers = segments.numbers()
    state, number, base = _newest_snapshot(segments, numbers)
    reader = batch.Reader(number)
    for found in _batches(segments, [segment for segment in numbers if segment >= base], reader):
        try:
            for event in found.events:
                state.apply(event)
        except (AsyncRLError, KeyError, ValueError, AssertionError) as error:
            raise JournalDamaged(
                f"{segments.folder}: batch {found.number} does not follow from those before: {error}"
            ) from None
    state.check()
    return Recovered(state, numbers[-1], reader.number, reader.rest)


def _newest_snapshot(segments: Segments, numbers: list[int]) -> tuple[State, int, int]:
    for base in reversed(numbers):
        found = _snapshot(segments, base)
        if found is not None:
            return found.state, found.number, base
        log.warning("%s: both copies of the state it begins with are damaged", segments.path(base))
    raise JournalDamaged(f"{segments.folder}: no segment begins with a state that can be read; nothing is left of it")


def _snapshot(segments: Segments, segment: int) -> _Snapshot | None:
    found = batch.snapshot(record.scan(segments.load(segment), segment))
    if found is None:
        return None
    try:
        return _Snapshot(snapshot.thaw(found.frames[0]), found.number)
    except (msgspec.DecodeError, KeyError) as error:
        raise JournalDamaged(
            f"{segments.path(segment)}: the state it begins with is of another version of async-rl: {error}"
        ) from None


def _batches(segments: Segments, numbers: list[int], reader: batch.Reader) -> Iterator[_Found]:
    decode = Codec(list[events.Any]).decode
    for segment in numbers:
        name = str(segments.path(segment))
        for found in reader.batches(name, segments.load(segment), segment):
            try:
                happened = decode(found.frames)
            except WireError as error:
                raise JournalDamaged(
                    f"{name}: batch {found.number} is of another version of async-rl: {error}"
                ) from None
            yield _Found(found.number, found.time, happened)
