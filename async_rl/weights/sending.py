"""A rank's parcels on their way: over a group, or into a file. One is filled while the one before it is under way."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from async_rl.weights.delta import Mask, block_sums, gather, size
from async_rl.weights.parcels import Parcel, loads
from async_rl.weights.source import Source, checksum, view_of

BUFFERS = 2  # one is filled while the other is under way
AHEAD = 4  # times the bytes of the largest message that may be under way: in place, so that they cost no memory

Sums = list["np.ndarray[tuple[int], np.dtype[np.uint64]]"]


class Outgoing(Protocol):
    def put(self, data: torch.Tensor) -> Callable[[], None]:
        """Begin to send bytes, which must stay as they are until what is returned has been called: it waits."""


class Sent(NamedTuple):
    checksums: list[int]
    sums: Sums  # of each parcel's blocks, where they were asked for


class Window:
    """What is under way: at most `most` bytes, or one message; those that are packed each in one of two buffers."""

    def __init__(self, most: int, buffer_bytes: int, device: torch.device) -> None:
        self._most = most
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._under_way: deque[tuple[Callable[[], None], int, int]] = deque()
        self._nbytes = self._turn = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """Wait until `nbytes` more may be under way; a buffer that nothing is under way in."""
        turn = (self._turn + 1) % BUFFERS
        while self._under_way and (
            self._nbytes + nbytes > self._most or any(buffer == turn for _, _, buffer in self._under_way)
        ):
            self.settle()
        return self._buffers[turn]

    def begun(self, wait: Callable[[], None], nbytes: int, *, packed: bool) -> None:
        """packed: the buffer that was given is in use now."""
        if packed:
            self._turn = (self._turn + 1) % BUFFERS
        self._under_way.append((wait, nbytes, self._turn if packed else -1))
        self._nbytes += nbytes

    def settle(self) -> None:
        """Wait for the oldest."""
        wait, nbytes, _ = self._under_way.popleft()
        self._nbytes -= nbytes
        wait()

    def finish(self) -> None:
        while self._under_way:
            self.settle()


def largest(parcels: Sequence[Parcel]) -> int:
    return max((parcel.nbytes for parcel in parcels), default=0)


def send_all(parcels: Sequence[Parcel], source: Source, channel: Outgoing, device: torch.device, *, sums: bool) -> Sent:
    """Every byte. Raises PublicationError where the channel does."""
    window = Window(AHEAD * largest(parcels), packed_bytes(parcels, source, device), device)
    checksums: list[int] = []
    of_blocks: Sums = []
    for parcel in parcels:
        staging = window.room(parcel.nbytes)
        data = source.bytes_of(parcel, staging)
        window.begun(channel.put(data), parcel.nbytes, packed=data.data_ptr() == staging.data_ptr())
        if sums:
            of_blocks.append(block_sums(view_of(data)))
        checksums.append(checksum(data))
    window.finish()
    return Sent(checksums, of_blocks)


def packed_bytes(parcels: Sequence[Parcel], source: Source, device: torch.device) -> int:
    """Of the largest parcel that is not sent from where it lies."""
    return max((parcel.nbytes for parcel in parcels if source.lies(parcel, device) is None), default=0)


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
    most = max((nbytes for nbytes, _ in messages), default=0)
    window = Window(AHEAD * most, most, device)
    for nbytes, parts in messages:
        message = window.room(nbytes)
        for k, at in parts:
            data = source.bytes_of(parcels[k], staging)
            gather(data, masks[k], message[at : at + sizes[k]])
        window.begun(channel.put(message[:nbytes]), nbytes, packed=True)
    window.finish()
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
