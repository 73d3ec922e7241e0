"""How a rank's pieces travel: as parcels, one message each, the same list on both sides. Pure.

A large piece that lies in the slot as one run goes in parcels of its own, which the receiver takes straight into the
slot. The others are packed one behind the other, those of equally large elements together, so that none is unaligned.
The checksum of a parcel is that of its bytes, whichever of them had to travel.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from async_rl.protocol.weight_sync import Bucket, Delivery, Piece, TensorEntry
from async_rl.weights.boxes import Box
from async_rl.weights.manifest import DTYPE_BYTES, spans

LARGE = 2**20  # bytes; a copy less is worth a message of its own
BLOCK = 4096  # bytes; the grain of a delta


class Place(NamedTuple):
    """The elements `box` of a layout's tensor, at byte `at` of its parcel."""

    tensor: int
    box: Box
    at: int
    nbytes: int


class Parcel(NamedTuple):
    places: list[Place]
    nbytes: int
    offset: int | None  # in the slot, of which it is one run; None: packed


def parcels(tensors: Sequence[TensorEntry], pieces: Sequence[Piece], bucket_bytes: int) -> list[Parcel]:
    """Of at most `bucket_bytes` each (one element at least), in the order in which they are sent."""
    found: list[Parcel] = []
    open_: dict[int, list[Place]] = {}  # by the size of an element: what is not yet a full parcel
    filled: dict[int, int] = {}
    for piece in pieces:
        entry, whole = tensors[piece.tensor], Box(tuple(piece.low), tuple(piece.high))
        size = DTYPE_BYTES[entry.dtype]
        large = whole.size * size >= min(LARGE, bucket_bytes // 4)
        for box in whole.pieces(max(bucket_bytes // size, 1)):
            nbytes = box.size * size
            offset = run(entry, box) if large else None
            if offset is not None:
                found.append(Parcel([Place(piece.tensor, box, 0, nbytes)], nbytes, offset))
                continue
            if filled.get(size, 0) + nbytes > bucket_bytes and open_.get(size):
                found.append(Parcel(open_.pop(size), filled.pop(size), None))
            at = filled.get(size, 0)
            open_.setdefault(size, []).append(Place(piece.tensor, box, at, nbytes))
            filled[size] = at + nbytes
    return found + [Parcel(open_[size], filled[size], None) for size in sorted(open_)]


def run(entry: TensorEntry, box: Box) -> int | None:
    """Where `box` begins in the slot, if its elements follow each other there; None where they do not."""
    behind = [d for d, n in enumerate(box.shape) if n > 1][:1]
    if any(box.shape[d] != entry.shape[d] for first in behind for d in range(first + 1, len(entry.shape))):
        return None
    index = 0
    for low, n in zip(box.low, entry.shape, strict=True):
        index = index * n + low
    return entry.offset + index * DTYPE_BYTES[entry.dtype]


def blocks(parcel: Parcel) -> int:
    return -(-parcel.nbytes // BLOCK)


def loads(sizes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Parts of `sizes` bytes, in their order, as messages of at most `most` (one part at least): (part, byte of the
    message at which it lies)."""
    found: list[list[tuple[int, int]]] = []
    filled = 0
    for part, nbytes in enumerate(sizes):
        if not found or filled + nbytes > most:
            found.append([])
            filled = 0
        found[-1].append((part, filled))
        filled += nbytes
    return found


def tiles(nbytes: int, known: Sequence[Bucket], bucket_bytes: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of buckets that tile a slot, those of `known` among them, whose bytes need not be read again."""
    found: list[tuple[int, int]] = []
    at = 0
    for bucket in [*sorted(known, key=lambda b: b.offset), None]:
        end = nbytes if bucket is None else bucket.offset
        found += [(at + start, size) for start, size in spans(end - at, bucket_bytes)]
        if bucket is not None:
            found.append((bucket.offset, bucket.nbytes))
            at = bucket.offset + bucket.nbytes
    return found


def coverage_problem(delivery: Delivery) -> str:
    """What of a slot a delivery would leave as it was, so that older weights would stay unseen; "" where nothing."""
    sizes = [0] * len(delivery.tensors)
    for piece in itertools.chain.from_iterable(delivery.pieces):
        if not 0 <= piece.tensor < len(sizes):
            return f"a piece of tensor {piece.tensor} of {len(sizes)}"
        entry, box = delivery.tensors[piece.tensor], Box(tuple(piece.low), tuple(piece.high))
        if len(box.low) != len(entry.shape) or not Box.whole(entry.shape).holds(box):
            return f"{entry.name}: a piece from {piece.low} to {piece.high} of a tensor of shape {entry.shape}"
        sizes[piece.tensor] += box.size * DTYPE_BYTES[entry.dtype]
    for entry, nbytes in zip(delivery.tensors, sizes, strict=True):
        if nbytes != entry.nbytes:
            return f"{entry.name}: {nbytes} of {entry.nbytes} bytes are to come"
    return ""
