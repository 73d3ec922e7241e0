"""Which blocks of a rank's parcels differ from what it sent before: known by their checksums, of 8 bytes a block."""

from typing import TypeAlias

import msgspec
import numpy as np
import torch
import xxhash

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Delivery
from async_rl.weights.parcels import BLOCK


class Base(msgspec.Struct):
    """What a rank sent last. `sums`: of each parcel's blocks."""

    version: int
    layout: int
    sums: list["np.ndarray[tuple[int], np.dtype[np.uint64]]"]


def block_sums(data: memoryview) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    digest = xxhash.xxh3_64_intdigest
    count = -(-len(data) // BLOCK)
    return np.fromiter((digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)), np.uint64, count)


def layout_of(delivery: Delivery, rank: int) -> int:
    """Equal where the rank's parcels are the same."""
    described = msgspec.msgpack.encode((delivery.tensors, delivery.pieces[rank], delivery.bucket_bytes))
    return int(xxhash.xxh3_64_intdigest(described))


def known(base: Base | None, delivery: Delivery, rank: int) -> Base:
    """`base`, if the delta may compare with it."""
    if base is None or (base.version, base.layout) != (delivery.base, layout_of(delivery, rank)):
        raise PublicationError(f"what was sent as version {delivery.base} is not known here any more")
    return base


Mask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"


def size(mask: Mask, nbytes: int) -> int:
    """Bytes of the blocks in `mask` of a parcel of `nbytes`."""
    short = len(mask) * BLOCK - nbytes if len(mask) and mask[-1] else 0
    return int(mask.sum()) * BLOCK - short


def gather(data: torch.Tensor, mask: Mask, into: torch.Tensor) -> None:
    """The blocks in `mask` of a parcel's bytes, one behind the other."""
    rows, index, tail = _cut(data, mask)
    whole = into[: len(index) * BLOCK].view(-1, BLOCK)
    torch.index_select(rows, 0, index.to(data.device), out=whole)
    if tail is not None:
        into[whole.numel() :].copy_(tail)


def scatter(data: torch.Tensor, mask: Mask, blocks: torch.Tensor) -> None:
    """`blocks`, as `gather` laid them, back to their places."""
    rows, index, tail = _cut(data, mask)
    whole = blocks[: len(index) * BLOCK].view(-1, BLOCK)
    rows[index] = whole
    if tail is not None:
        tail.copy_(blocks[whole.numel() :])


def _cut(data: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Full blocks as rows, which of them are meant, and the shorter last block where it is."""
    full = len(data) // BLOCK
    index = torch.from_numpy(np.flatnonzero(mask[:full]))
    tail = data[full * BLOCK :] if len(mask) > full and mask[-1] else None
    return data[: full * BLOCK].view(-1, BLOCK), index, tail
