"""A rank's parcels on their way: over a group, or into a file. One is filled while the one before it is under way."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from async_rl.weights.delta import Mask, block_sums, gather, size
from async_rl.weights.parcels import Parcel, loads
from async_rl.weights.source import Source, checksum, view_of

DEPTH = 2  # messages under way

Sums = list["np.ndarray[tuple[int], np.dtype[np.uint64]]"]


class Outgoing(Protocol):
    def put(self, data: torch.Tensor) -> Callable[[], None]:
        """Begin to send bytes, which must stay as they are until what is returned has been called: it waits."""


class Sent(NamedTuple):
    checksums: list[int]
    sums: Sums  # of each parcel's blocks, where they were asked for


class Buffers:
    """DEPTH message buffers, used in turn, and the waits of what is under way in them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(DEPTH)]
        self._under_way: deque[Callable[[], None]] = deque()
        self._turn = 0

    def next(self) -> torch.Tensor:
        """A buffer that nothing is under way in."""
        if len(self._under_way) == DEPTH:
            self._under_way.popleft()()
        self._turn += 1
        return self._buffers[self._turn % DEPTH]

    def under_way(self, wait: Callable[[], None]) -> None:
        self._under_way.append(wait)

    def finish(self) -> None:
        while self._under_way:
            self._under_way.popleft()()


def largest(parcels: Sequence[Parcel]) -> int:
    return max((parcel.nbytes for parcel in parcels), default=0)


def send_all(parcels: Sequence[Parcel], source: Source, channel: Outgoing, device: torch.device, *, sums: bool) -> Sent:
    """Every byte. Raises PublicationError where the channel does."""
    buffers = Buffers(largest(parcels), device)
    checksums: list[int] = []
    of_blocks: Sums = []
    for parcel in parcels:
        data = source.bytes_of(parcel, buffers.next())
        buffers.under_way(channel.put(data))
        if sums:
            view = view_of(data)
            of_blocks.append(block_sums(view))
        checksums.append(checksum(data))
    buffers.finish()
    return Sent(checksums, of_blocks)


def send_changed(
    parcels: Sequence[Parcel],
    source: Source,
    open_: Callable[[int], Outgoing],
    before: Sums,
    most: int,
    device: torch.device,
) -> Sent:
    """The blocks whose sums are not those of `before`: a message that says which, then messages of `most` bytes.

    open_: the channel, for so many bytes behind the first message.
    """
    staging = torch.empty(largest(parcels), dtype=torch.uint8, device=device)
    checksums: list[int] = []
    sums: Sums = []
    masks: list[Mask] = []
    for parcel, old in zip(parcels, before, strict=True):
        data = source.bytes_of(parcel, staging)
        checksums.append(checksum(data))
        sums.append(block_sums(view_of(data)))
        masks.append(sums[-1] != old)
    sizes = [size(mask, parcel.nbytes) for mask, parcel in zip(masks, parcels, strict=True)]
    channel = open_(sum(sizes))
    channel.put(torch.from_numpy(np.concatenate(masks).view(np.uint8)).to(device))()
    messages = messages_of(sizes, most)
    buffers = Buffers(max((nbytes for nbytes, _ in messages), default=0), device)
    for nbytes, parts in messages:
        message = buffers.next()
        for k, at in parts:
            data = source.bytes_of(parcels[k], staging)
            gather(data, masks[k], message[at : at + sizes[k]])
        buffers.under_way(channel.put(message[:nbytes]))
    buffers.finish()
    return Sent(checksums, sums)


def messages_of(sizes: Sequence[int], most: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """(bytes, [(parcel, byte of the message)]) of each message of a delta; `sizes` by parcel, many of them 0."""
    some = [k for k, nbytes in enumerate(sizes) if nbytes]
    found = []
    for load in loads([sizes[k] for k in some], most):
        parts = [(some[index], at) for index, at in load]
        last, at = parts[-1]
        found.append((at + sizes[last], parts))
    return found
