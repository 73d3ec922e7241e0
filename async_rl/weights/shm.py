"""A rank writes its pieces into a relay's slot in shared memory."""

import ctypes
import mmap

import torch
import xxhash

from async_rl.protocol.weight_sync import Delivery
from async_rl.weights.boxes import Box
from async_rl.weights.manifest import each, spans, view
from async_rl.weights.source import Source, copy

CACHED = 256 * 2**10  # bytes copied at a time: their checksum is made while the second-level cache still has them


def write(delivery: Delivery, rank: int, source: Source, slot: mmap.mmap) -> list[int]:
    """The pieces of `rank` into `slot`; the checksums of the slot's buckets where no other rank writes any of them."""
    alone = not any(pieces for other, pieces in enumerate(delivery.pieces) if other != rank)
    if alone:
        return each(_Whole(delivery, source, slot).bucket, spans(delivery.nbytes, delivery.bucket_bytes))
    tensors = delivery.tensors
    boxes = [(piece.tensor, Box(tuple(piece.low), tuple(piece.high))) for piece in delivery.pieces[rank]]

    def place(one: tuple[int, Box]) -> None:
        tensor, box = one
        entry = tensors[tensor]
        copy(view(entry, slot)[box.inside(Box.whole(entry.shape))], source.part(tensor, box))

    each(place, boxes)
    return []


class _Whole:
    """All of a model, bucket by bucket, each with its checksum."""

    def __init__(self, delivery: Delivery, source: Source, slot: mmap.mmap) -> None:
        self._tensors, self._source = delivery.tensors, source
        self._slot, self._view = torch.frombuffer(slot, dtype=torch.uint8), memoryview(slot)
        wholes = [source.part(k, Box.whole(entry.shape)) for k, entry in enumerate(delivery.tensors)]
        self._flat = [whole.reshape(-1) for whole in wholes]
        cpu = torch.device("cpu")
        self._plain = [
            flat.data_ptr() if flat.device == cpu and source.is_as_sent(k) else None
            for k, flat in enumerate(self._flat)
        ]

    def bucket(self, span: tuple[int, int]) -> int:
        start, nbytes = span
        sum_, at = xxhash.xxh3_64(), start
        for k, entry in enumerate(self._tensors):
            low, high = max(entry.offset, start), min(entry.offset + entry.nbytes, start + nbytes)
            if low >= high:
                continue
            sum_.update(self._view[at:low])  # the gap before it, cleared
            for begin in range(low, high, CACHED):
                end = min(begin + CACHED, high)
                self._copy(k, begin, end)
                sum_.update(self._view[begin:end])
            at = high
        sum_.update(self._view[at : start + nbytes])
        return int(sum_.intdigest())

    def _copy(self, k: int, begin: int, end: int) -> None:
        """What lies in the slot from byte `begin` to `end`, all of tensor `k`."""
        entry, plain = self._tensors[k], self._plain[k]
        if plain is not None:
            ctypes.memmove(self._slot.data_ptr() + begin, plain + begin - entry.offset, end - begin)
            return
        dtype: torch.dtype = getattr(torch, entry.dtype)
        elements = slice((begin - entry.offset) // dtype.itemsize, (end - entry.offset) // dtype.itemsize)
        self._slot[begin:end].view(dtype).copy_(self._flat[k][elements])
