"""The bytes of a rank's parcels: taken from its tensors where they lie as they are sent, packed and cast otherwise."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import TensorEntry
from async_rl.weights.boxes import Box
from async_rl.weights.holdings import held
from async_rl.weights.parcels import Parcel

if TYPE_CHECKING:
    from async_rl.weights.holdings import Model


class Source:
    """A model's tensors by their index in a layout."""

    def __init__(self, model: "Model", tensors: Sequence[TensorEntry]) -> None:
        found = {one.name: one for one in held(model)}
        missing = [entry.name for entry in tensors if entry.name not in found]
        if missing:
            raise PublicationError(f"this rank's model has no {missing[0]} ({len(missing)} names missing)")
        self._held = [found[entry.name] for entry in tensors]
        self._dtypes: list[torch.dtype] = [getattr(torch, entry.dtype) for entry in tensors]

    def part(self, tensor: int, box: Box) -> torch.Tensor:
        """The elements `box` of a tensor, of its own dtype: a view."""
        own = self._held[tensor]
        return own.tensor[box.inside(own.box)]

    def is_as_sent(self, tensor: int) -> bool:
        """Whether its bytes are those that are published."""
        return self._held[tensor].tensor.dtype == self._dtypes[tensor]

    def lies(self, parcel: Parcel, device: torch.device) -> torch.Tensor | None:
        """[parcel.nbytes], uint8: the tensor itself, where its bytes are the parcel's and on `device`."""
        if len(parcel.places) != 1:
            return None
        place = parcel.places[0]
        part = self.part(place.tensor, place.box)
        as_sent = part.device == device and part.is_contiguous() and self.is_as_sent(place.tensor)
        return part.reshape(-1).view(torch.uint8) if as_sent else None

    def bytes_of(self, parcel: Parcel, staging: torch.Tensor) -> torch.Tensor:
        """[parcel.nbytes], uint8, on the device of `staging`: the tensor itself, else a copy at the start of
        `staging`. Valid until the one or the other is written."""
        lying = self.lies(parcel, staging.device)
        if lying is not None:
            return lying
        for place in parcel.places:
            into = staging[place.at : place.at + place.nbytes].view(self._dtypes[place.tensor])
            into.view(place.box.shape).copy_(self.part(place.tensor, place.box))
        return staging[: parcel.nbytes]


def checksum(data: torch.Tensor) -> int:
    """xxh3_64 of contiguous bytes, uint8."""
    return int(xxhash.xxh3_64_intdigest(view_of(data)))


def view_of(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor of uint8; of a device's a copy."""
    plain: Any = data.cpu().numpy()
    return memoryview(plain)


def copy(into: torch.Tensor, part: torch.Tensor) -> None:
    """`part` into `into`, of the same shape. Plain bytes are the C library's to move, half again as fast as torch."""
    if (
        into.dtype == part.dtype
        and into.device == part.device == torch.device("cpu")
        and into.is_contiguous()
        and part.is_contiguous()
    ):
        ctypes.memmove(into.data_ptr(), part.data_ptr(), into.numel() * into.element_size())
    else:
        into.copy_(part)


def move(into: mmap.mmap, source: mmap.mmap, nbytes: int) -> None:
    """The first `nbytes` of one slot to another, without the interpreter's lock."""
    target, origin = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (into, source))
    ctypes.memmove(target.data_ptr(), origin.data_ptr(), nbytes)
