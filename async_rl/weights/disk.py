"""A version on disk: one safetensors file of each rank, in a folder that the trainer and the relays share.

Written aside, made durable, renamed: a file that has its name is whole. With one rank and full publications it is a
model's file as transformers writes them; a part of a tensor is named by its indices behind the tensor's name.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Delivery, Folder, TensorEntry
from async_rl.rundir import make_durable
from async_rl.weights.boxes import Box
from async_rl.weights.parcels import Parcel, Place, blocks
from async_rl.weights.source import view_of

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def file_of(delivery: Delivery, rank: int) -> Path:
    assert isinstance(delivery.way, Folder)
    kind = "full" if delivery.base < 0 else "delta"
    name = f"{kind}-{delivery.epoch:06d}-{delivery.version:08d}-rank-{rank:05d}.safetensors"
    return Path(delivery.way.path) / name


def tidy(folder: Path, epoch: int, version: int) -> None:
    """Remove every version but this one, and what writers that died have left."""
    for path in folder.glob("*.safetensors*"):
        if f"-{epoch:06d}-{version:08d}-" not in path.name or path.suffix != ".safetensors":
            path.unlink(missing_ok=True)


class Writing:
    """`with Writing(path) as file: file.begin(tensors, about); file.put(bytes)...`: the file has its name when all is
    in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_suffix(f".safetensors.{os.getpid()}")

    def __enter__(self) -> "Writing":
        with _told(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._aside.open("wb", buffering=0)
        return self

    def begin(self, tensors: Sequence[tuple[str, str, Sequence[int], int]], about: dict[str, str]) -> None:
        """The header. tensors: (name, dtype, shape, nbytes), in the order of their bytes."""
        header: dict[str, Any] = {"__metadata__": about}
        at = 0
        for name, dtype, shape, nbytes in tensors:
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        with _told(self._path):
            _write(self._file, memoryview(struct.pack("<Q", len(text)) + text))

    def __exit__(self, kind: object, *_: object) -> None:
        with _told(self._path), self._file:
            if kind is None:
                os.fsync(self._file.fileno())
                self._aside.replace(self._path)
                make_durable(self._path.parent)
            else:
                self._aside.unlink(missing_ok=True)

    def put(self, data: torch.Tensor) -> Callable[[], None]:
        with _told(self._path):
            _write(self._file, view_of(data))
        return lambda: None


class Reading:
    """`with Reading(path) as file: file.get(into)...`: the bytes in their order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "Reading":
        with _told(self._path):
            self._file: BinaryIO = self._path.open("rb", buffering=0)
            (length,) = struct.unpack("<Q", self._file.read(8).ljust(8, b"\0"))
            self._file.seek(8 + length)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, into: torch.Tensor) -> Callable[[], None]:
        view, at = view_of(into), 0
        with _told(self._path):
            while at < len(view):
                read = self._file.readinto(view[at:])  # type: ignore[attr-defined]
                if not read:
                    raise PublicationError(f"{self._path} is cut: {len(view) - at} bytes are missing")
                at += read
        return lambda: None


def described(tensors: Sequence[TensorEntry], parcels: Sequence[Parcel]) -> list[tuple[str, str, Sequence[int], int]]:
    """(name, dtype, shape, nbytes) of what `parcels` hold, one behind the other; parts of a tensor that follow each
    other in the slot, too, are one."""
    found: list[tuple[str, str, Sequence[int], int]] = []
    boxes: list[tuple[int, Box, int]] = []  # tensor, box, bytes
    for parcel in parcels:
        for place in parcel.places:
            last = boxes[-1] if boxes else None
            joined = None if last is None or last[0] != place.tensor else _joined(last[1], place)
            if joined is not None and last is not None:
                boxes[-1] = place.tensor, joined, last[2] + place.nbytes
            else:
                boxes.append((place.tensor, place.box, place.nbytes))
    for tensor, box, nbytes in boxes:
        entry = tensors[tensor]
        indices = ", ".join(f"{low}:{high}" for low, high in zip(box.low, box.high, strict=True))
        name = entry.name if list(box.shape) == entry.shape else f"{entry.name}[{indices}]"
        found.append((name, entry.dtype, box.shape, nbytes))
    return found


def described_delta(parcels: Sequence[Parcel], nbytes: int) -> list[tuple[str, str, Sequence[int], int]]:
    count = sum(map(blocks, parcels))
    return [("changed", "uint8", [count], count), ("blocks", "uint8", [nbytes], nbytes)]


def _joined(box: Box, place: Place) -> Box | None:
    """One box below the other, along dimension 0, as one."""
    below = place.box
    if box.low and box.high[0] == below.low[0] and box.along(0, 0, 0) == below.along(0, 0, 0):
        return Box(box.low, below.high)
    return None


def _write(file: BinaryIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """The system's errors as one line that names the setting."""
    try:
        yield
    except OSError as error:
        raise PublicationError(f"weight_sync.path: {path}: {error.strerror}") from None
