"""A relay takes a delivery into a slot: a thread for each rank that sends something, each with a group or a file."""

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import torch

from async_rl.errors import AsyncRLError, PublicationError
from async_rl.protocol.weight_sync import Bucket, Delivery, Links, Manifest, TensorEntry
from async_rl.weights import disk
from async_rl.weights.boxes import Box
from async_rl.weights.delta import Mask, scatter, size
from async_rl.weights.links import Groups
from async_rl.weights.manifest import Layout, clear_gaps, seal, view
from async_rl.weights.parcels import Parcel, blocks, parcels, tiles
from async_rl.weights.sending import AHEAD, Window, largest, messages_of
from async_rl.weights.source import checksum


class Incoming(Protocol):
    def get(self, into: torch.Tensor) -> Callable[[], None]:
        """Begin to receive exactly the bytes of `into`; what is returned waits for them."""


class Reception:
    """One delivery on its way into `slot`, which holds `delivery.base` where it is a delta."""

    def __init__(self, delivery: Delivery, relay: str, device: str, slot: mmap.mmap, groups: Groups) -> None:
        self.delivery = delivery
        self._relay, self._device, self._slot, self._groups = relay, torch.device(device), slot, groups
        if delivery.base < 0:
            clear_gaps(delivery.tensors, slot)
        self._parcels = [parcels(delivery.tensors, own, delivery.bucket_bytes) for own in delivery.pieces]
        self._ranks = [_thread(self._receive, rank) if own else None for rank, own in enumerate(self._parcels)]

    def wait(self) -> list[list[int]]:
        """The checksums of each rank's parcels, as they are in the slot. Raises PublicationError where a rank's do
        not come; each wait inside has a deadline of its own."""
        return [[] if rank is None else rank.result() for rank in self._ranks]

    def manifest(self, received: Sequence[Sequence[int]]) -> Manifest:
        """Of the slot. What was received as one run of it is a bucket, whose checksum is known."""
        delivery = self.delivery
        runs = [
            Bucket(parcel.offset, parcel.nbytes, sum_)
            for own, sums in zip(self._parcels, received, strict=True)
            for parcel, sum_ in zip(own, sums, strict=True)
            if parcel.offset is not None
        ]
        layout = Layout(delivery.tensors, tiles(delivery.nbytes, runs, delivery.bucket_bytes), delivery.nbytes)
        known = {(bucket.offset, bucket.nbytes): bucket.checksum for bucket in runs}
        manifest = seal(layout, self._slot, version=delivery.version, epoch=delivery.epoch, known=known)
        return msgspec.structs.replace(manifest, lora=delivery.lora)

    def _receive(self, rank: int) -> list[int]:
        delivery, own = self.delivery, self._parcels[rank]
        slot = _Slot(delivery.tensors, self._slot)
        if isinstance(delivery.way, Links):
            channel = self._groups.channel(delivery.way, rank, self._relay)
            return self._take(own, slot, channel, self._device)
        with disk.Reading(disk.file_of(delivery, rank)) as file:
            return self._take(own, slot, file, torch.device("cpu"))

    def _take(self, own: list[Parcel], slot: "_Slot", channel: Incoming, device: torch.device) -> list[int]:
        if self.delivery.base < 0:
            return receive_all(own, slot, channel, device)
        receive_changed(own, slot, channel, self.delivery.bucket_bytes, device)
        staging = torch.empty(largest(own), dtype=torch.uint8)
        return [checksum(slot.bytes_of(parcel, staging)) for parcel in own]


def receive_all(own: Sequence[Parcel], slot: "_Slot", channel: Incoming, device: torch.device) -> list[int]:
    """Every parcel; its checksum is made while later ones are under way."""
    here = device.type == "cpu"
    most = largest([parcel for parcel in own if not here or parcel.offset is None])
    window = Window(AHEAD * largest(own), most, device)
    checksums: list[int] = []

    def take(parcel: Parcel, landing: torch.Tensor, wait: Callable[[], None]) -> None:
        wait()
        data = landing
        if parcel.offset is None:
            data = landing.cpu()
            slot.settle(parcel, data)
        elif not here:
            data = slot.run(parcel.offset, parcel.nbytes)
            data.copy_(landing)
        checksums.append(checksum(data))

    for parcel in own:
        landing = window.room(parcel.nbytes)[: parcel.nbytes]
        packed = not here or parcel.offset is None
        if not packed and parcel.offset is not None:
            landing = slot.run(parcel.offset, parcel.nbytes)
        window.begun(partial(take, parcel, landing, channel.get(landing)), parcel.nbytes, packed=packed)
    window.finish()
    return checksums


def receive_changed(own: Sequence[Parcel], slot: "_Slot", channel: Incoming, most: int, device: torch.device) -> None:
    """The blocks that changed, over what is in the slot."""
    changed = torch.empty(sum(map(blocks, own)), dtype=torch.uint8, device=device)
    channel.get(changed)()
    cuts = np.cumsum([blocks(parcel) for parcel in own])[:-1]
    masks: list[Mask] = np.split(changed.cpu().numpy().astype(bool), cuts)
    sizes = [size(mask, parcel.nbytes) for mask, parcel in zip(masks, own, strict=True)]
    staging = torch.empty(largest(own), dtype=torch.uint8)
    for nbytes, parts in messages_of(sizes, most):
        message = torch.empty(nbytes, dtype=torch.uint8, device=device)
        channel.get(message)()
        here = message.cpu()
        for k, at in parts:
            data = slot.bytes_of(own[k], staging)
            scatter(data, masks[k], here[at : at + sizes[k]])
            if own[k].offset is None:
                slot.settle(own[k], data)


class _Slot:
    """The tensors in a slot, by their index in the layout."""

    def __init__(self, tensors: Sequence[TensorEntry], slot: mmap.mmap) -> None:
        self._tensors, self._slot = tensors, slot
        self._bytes = torch.frombuffer(slot, dtype=torch.uint8)

    def run(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def bytes_of(self, parcel: Parcel, staging: torch.Tensor) -> torch.Tensor:
        """The bytes of `parcel`: in the slot itself where they are one run of it, else a copy in `staging`."""
        if parcel.offset is not None:
            return self.run(parcel.offset, parcel.nbytes)
        for place in parcel.places:
            part = self._part(place.tensor, place.box)
            staging[place.at : place.at + place.nbytes].view(part.dtype).view(part.shape).copy_(part)
        return staging[: parcel.nbytes]

    def settle(self, parcel: Parcel, data: torch.Tensor) -> None:
        """A packed parcel's bytes to their places."""
        for place in parcel.places:
            part = self._part(place.tensor, place.box)
            part.copy_(data[place.at : place.at + place.nbytes].view(part.dtype).view(part.shape))

    def _part(self, tensor: int, box: Box) -> torch.Tensor:
        entry = self._tensors[tensor]
        return view(entry, self._slot)[box.inside(Box.whole(entry.shape))]


def _thread(work: Callable[[int], list[int]], rank: int) -> "Future[list[int]]":
    """A thread that no exit of the process waits for."""
    future: Future[list[int]] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                future.set_result(work(rank))
        except Exception as error:  # whatever it is: this delivery fails, and the relay goes on
            kind = "" if isinstance(error, AsyncRLError) else f"{type(error).__name__}: "
            future.set_exception(PublicationError(f"from rank {rank}: {kind}{error}"))

    threading.Thread(target=run, name=f"from rank {rank}", daemon=True).start()
    return future
