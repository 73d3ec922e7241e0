"""Messages to frames and back. No pickle; what does not decode raises WireError and harms nobody.

    frame 0   envelope (msgpack array): what kind of frame this is, and its sequence number
    frame 1   body (msgpack): one message of the service's tagged union
    frame 2.. one array each, as raw bytes

An array in the body stands as [dtype, shape, k]: k is the index of its frame, or the bytes themselves where
the array is smaller than INLINE_BYTES (a frame of its own costs more than the copy).

A greeting comes first: hello -> welcome, or a refusal. Then request -> reply or fault, and ping -> pong.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from async_rl.errors import WireError

INLINE_BYTES = 16 * 1024
CREDIT = 256  # requests that one peer may have under way
HIGH_WATER_MARK = 1000  # messages that ZeroMQ queues for one peer before the sender must wait
DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})

_DTYPES = {name: np.dtype(name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Frame = bytes | memoryview | zmq.Frame


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """New fields go last and have a default, so that another schema is refused by its number."""

    schema: int
    service: str  # the service the sender believes it talks to, "buffer"
    sender: str
    run: str = ""  # the run it belongs to: a port may have passed to another run's service


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    schema: int
    service: str
    incarnation: str


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """No service for this peer: another schema, another service, another run."""

    reason: str
    final: bool  # asking again is of no use


class Ungreeted(msgspec.Struct, frozen=True, array_like=True, tag="ungreeted"):
    """A request came without a greeting: the service was started anew, greet and send it again."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    pass


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    incarnation: str


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    sequence: int
    wants_reply: bool  # False: a reply without a body, once it was carried out


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    sequence: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """The request was refused, or its handler failed."""

    sequence: int
    reason: str


Envelope = Hello | Welcome | Refusal | Ungreeted | Ping | Pong | Request | Reply | Fault

_envelope_encoder = msgspec.msgpack.Encoder()
_envelope_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _envelope_encoder.encode(envelope)


def decode_envelope(frame: Frame) -> Envelope:
    try:
        return _envelope_decoder.decode(bytes_of(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no envelope: {_one_line(error)}") from None


class Codec:
    """Encodes and decodes the messages of one union. Not for use by two threads at once.

    inline_bytes: arrays below it stand in the body."""

    def __init__(self, union: Any, inline_bytes: int = INLINE_BYTES) -> None:
        self._inline_bytes = inline_bytes
        self._arrays: list[Frame] = []
        self._taken: set[int] = set()  # array frames that the body has named
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union, dec_hook=self._take)

    def encode(self, message: Any) -> list[Frame]:
        """The body and array frames of `message`. Array frames are views: do not write to them until sent."""
        self._arrays = []
        body = self._encoder.encode(message)
        frames = [body, *self._arrays]
        self._arrays = []
        return frames

    def decode(self, frames: Sequence[Frame]) -> Any:
        """The message in `frames`; its large arrays are read-only views of them."""
        if not frames:
            raise WireError("no body")
        self._arrays = list(frames[1:])
        self._taken = set()
        try:
            message = self._decoder.decode(bytes_of(frames[0]))
        except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise WireError(f"malformed message: {_one_line(error)}") from None
        finally:
            self._arrays = []
        if len(self._taken) != len(frames) - 1:
            raise WireError(f"malformed message: {len(frames) - 1} arrays, {len(self._taken)} named in the body")
        return message

    def _put(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} has no wire format")
        name = _NAMES.get(value.dtype)
        if name is None:
            name = value.dtype.name
            if name not in DTYPES:
                raise TypeError(f"arrays of {value.dtype} have no wire format")
            value = value.astype(name)  # of another byte order
        if not value.flags.c_contiguous:
            value = np.ascontiguousarray(value)
        if value.nbytes < self._inline_bytes:
            return [name, value.shape, value.tobytes()]
        self._arrays.append(memoryview(value).cast("B"))
        return [name, value.shape, len(self._arrays) - 1]

    def _take(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise ValueError(f"no wire format for {kind.__name__}")
        if type(value) is not list or len(value) != 3 or type(value[0]) is not str or type(value[1]) is not list:
            raise ValueError("an array stands as [dtype, shape, frame]")
        name, shape, place = value
        dtype = _DTYPES.get(name)
        if dtype is None or type(place) not in (bytes, int):
            raise ValueError("an array stands as [dtype, shape, frame]")
        for size in shape:
            if type(size) is not int or not 0 <= size < 2**40:
                raise ValueError("a shape is a list of sizes")
        flat = np.frombuffer(raw, dtype) if (raw := self._raw(place)) else np.empty(0, dtype)
        if not flat.flags.aligned:  # a small frame lies anywhere in ZeroMQ's receive buffer; torch wants it aligned
            flat = flat.copy()
        if flat.flags.writeable:
            flat.flags.writeable = False
        return flat if len(shape) == 1 and shape[0] == flat.size else flat.reshape(shape)

    def _raw(self, place: bytes | int) -> bytes | memoryview:
        """The bytes themselves, or those of the frame that is named."""
        if isinstance(place, bytes):
            return place
        if not 0 <= place < len(self._arrays):
            raise ValueError("an array stands as [dtype, shape, frame]")
        self._taken.add(place)
        return bytes_of(self._arrays[place])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def bytes_of(frame: Frame) -> bytes | memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else frame
