"""One record of the journal. Pure: bytes in, bytes out.

    magic | kind u32 | segment u32 | number u64 | offset u64 | unix time f64 | length u64 | xxh3_64 | payload

The payload is a message of wire.py: how many frames, the size of each, the frames. The checksum covers what
stands before it, and the payload. Segment and offset say where the record lies, so bytes that look like a record
are none anywhere else: not inside a trajectory, not in a copy of the file under another name.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

from async_rl.actor.wire import Frame, bytes_of

MAGIC = b"\xa5ARL"
_FIELDS = struct.Struct("<4sIIQQdQ")
_CHECKSUM = struct.Struct("<Q")
_SIZE = struct.Struct("<I")
HEAD = _FIELDS.size + _CHECKSUM.size

Part = bytes | memoryview  # of single bytes: its length is its size


class Kind(IntEnum):
    SNAPSHOT = 1  # the state before batch `number`
    EVENTS = 2  # those of batch `number`
    TRAJECTORY = 3
    DRAW = 4


class Record(NamedTuple):
    kind: int
    number: int  # of the batch it belongs to
    time: float  # unix
    start: int  # offset in its segment
    end: int  # offset behind it
    frames: list[memoryview]


class Encoded(NamedTuple):
    parts: list[Part]  # to write one after another; arrays are not copied
    nbytes: int


def encode(kind: Kind, segment: int, number: int, offset: int, time: float, frames: Sequence[Frame]) -> Encoded:
    parts = [bytes_of(frame) for frame in frames]
    sizes = [len(part) for part in parts]
    table = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
    length = len(table) + sum(sizes)
    fields = _FIELDS.pack(MAGIC, kind, segment, number, offset, time, length)
    checksum = _CHECKSUM.pack(_digest(fields, table, *parts))
    return Encoded([fields + checksum + table, *parts], HEAD + length)


def read(data: memoryview, segment: int, start: int, base: int = 0) -> Record | None:
    """The record at offset `start` of `segment`; None where none is whole there. `data` begins at offset `base`."""
    at = start - base
    if at + HEAD > len(data):
        return None
    magic, kind, where, number, offset, time, length = _FIELDS.unpack_from(data, at)
    if magic != MAGIC or where != segment or offset != start or length > len(data) - at - HEAD:
        return None
    payload = data[at + HEAD : at + HEAD + length]
    (checksum,) = _CHECKSUM.unpack_from(data, at + _FIELDS.size)
    if _digest(data[at : at + _FIELDS.size], payload) != checksum:
        return None
    return Record(kind, number, time, start, start + HEAD + length, _frames(payload))


def scan(data: bytes, segment: int) -> Iterator[Record]:
    """The whole records of a segment, in order; what lies between them, and behind the last, is passed over."""
    view, start = memoryview(data), 0
    while start >= 0:
        record = read(view, segment, start)
        if record is not None:
            yield record
        start = record.end if record is not None else data.find(MAGIC, start + 1)
        if start == len(data):
            return


def _frames(payload: memoryview) -> list[memoryview]:
    (count,) = _SIZE.unpack_from(payload, 0)
    place = _SIZE.size * (count + 1)
    frames = []
    for size in struct.unpack_from(f"<{count}I", payload, _SIZE.size):
        frames.append(payload[place : place + size])
        place += size
    return frames


def _digest(*parts: Part) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
