"""What the pool and a worker process say to each other, over the worker's stdin and stdout.

A frame is four bytes of length (little-endian) and a msgpack list of bytes: the message and its arrays, as
async_rl/actor/wire.py writes them. No pickle.
"""

import struct
from typing import Any

import msgspec

from async_rl.actor.wire import Codec
from async_rl.config.schema import Grader
from async_rl.errors import WireError
from async_rl.protocol.base import Message
from async_rl.trajectory import Score, Task, Trajectory

HEAD_BYTES = 4
MAX_BYTES = 2**30


class Build(Message, frozen=True):
    """The first order: the grader to build."""

    grader: Grader


class Grade(Message, frozen=True):
    task: Task
    trajectory: Trajectory


class Ready(Message, frozen=True):
    """The grader is built."""


class Unusable(Message, frozen=True):
    """It cannot be; the text of a UserError."""

    reason: str


class Graded(Message, frozen=True):
    score: Score


class Gone(Message, frozen=True):
    """The grading process ended by itself."""

    reason: str


Order = Build | Grade
Answer = Ready | Unusable | Graded | Gone

_encode = msgspec.msgpack.Encoder().encode
_parts = msgspec.msgpack.Decoder(list[bytes]).decode


def pack(codec: Codec, message: Any) -> bytes:
    body = _encode(codec.encode(message))
    return struct.pack("<I", len(body)) + body


def length(head: bytes) -> int:
    """Bytes of the body that follows `head`."""
    count: int = struct.unpack("<I", head)[0]
    if count > MAX_BYTES:
        raise WireError(f"a frame of {count} bytes")
    return count


def unpack(codec: Codec, body: bytes) -> Any:
    try:
        return codec.decode(_parts(body))
    except msgspec.DecodeError as error:
        raise WireError(f"malformed frame: {error}") from None
