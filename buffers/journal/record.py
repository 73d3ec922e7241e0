"""One record of the journal. Pure: bytes in, bytes out.

    length u32 | xxh3_64 of the length and the payload | payload

The payload is a message of wire.py: how many frames, the size of each, the frames. What a crash left unfinished
at the end of the file is told apart from damage before it: only after the former comes no whole record.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from async_rl.actor.wire import Frame, bytes_of
from async_rl.errors import JournalDamaged

_HEAD = struct.Struct("<IQ")
_SIZE = struct.Struct("<I")

Part = bytes | memoryview  # of single bytes: its length is its size


class Record(NamedTuple):
    end: int  # offset behind it
    frames: list[memoryview]


def encode(frames: Sequence[Frame]) -> list[Part]:
    """The record as buffers to write one after another; arrays are not copied."""
    parts = [bytes_of(frame) for frame in frames]
    sizes = [len(part) for part in parts]
    table = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
    payload = [table, *parts]
    length = len(table) + sum(sizes)
    return [_HEAD.pack(length, _checksum(length, payload)), *payload]


def scan(data: memoryview) -> Iterator[Record]:
    """The whole records of `data`; ends before an unfinished write.

    JournalDamaged where a record does not match its checksum and a whole one lies behind it.
    """
    offset = 0
    while (record := _at(data, offset)) is not None:
        yield record
        offset = record.end
    behind = _next_whole(data, offset + 1)
    if behind is not None:
        raise JournalDamaged(f"bytes {offset} to {behind} are not those that were written")


def _at(data: memoryview, offset: int) -> Record | None:
    """The record at `offset`; None where none is whole there."""
    body = offset + _HEAD.size
    if body + _SIZE.size > len(data):
        return None
    length, checksum = _HEAD.unpack_from(data, offset)
    payload = data[body : body + length]
    if length < _SIZE.size or len(payload) < length or _checksum(length, [payload]) != checksum:
        return None
    (count,) = _SIZE.unpack_from(payload, 0)
    place = _SIZE.size * (count + 1)
    frames = []
    for size in struct.unpack_from(f"<{count}I", payload, _SIZE.size):
        frames.append(payload[place : place + size])
        place += size
    return Record(body + length, frames)


def _next_whole(data: memoryview, start: int) -> int | None:
    """Where the first whole record at or behind `start` begins. A torn tail is short, so is this search."""
    for offset in range(start, len(data) - _HEAD.size):
        length = _SIZE.unpack_from(data, offset)[0]
        if offset + _HEAD.size + length <= len(data) and _at(data, offset) is not None:
            return offset
    return None


def _checksum(length: int, parts: Sequence[Part]) -> int:
    digest = xxhash.xxh3_64(_SIZE.pack(length))
    for part in parts:
        digest.update(part)
    return digest.intdigest()
