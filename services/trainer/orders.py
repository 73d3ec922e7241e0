"""What the leading rank tells the others to do, and how it gets there: all ranks of a trainer do the same at the same
time. The sizes of an order's frames wait in the store, at which a rank that has nothing to do may stand for hours; its
bytes follow as a broadcast."""

from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed

from async_rl.actor.wire import Codec, bytes_of
from async_rl.config.schema import Model
from async_rl.protocol.buffer import Cursor, Drawn
from async_rl.weights.order import Order

dist: Any = torch.distributed  # whose stubs leave out what is used here
POLL = timedelta(seconds=1)


class Load(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """The newest checkpoint of the run, else `first`, the model that it begins with."""

    first: Model


class LoadVersion(msgspec.Struct, frozen=True, tag="load_version", forbid_unknown_fields=True):
    """That of another run, which was made under `settings`; version -1: `first`."""

    first: Model
    folder: str  # of the checkpoints
    version: int
    settings: dict[str, Any]


class Step(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    drawn: Drawn


class Save(msgspec.Struct, frozen=True, tag="save", forbid_unknown_fields=True):
    version: int
    cursor: Cursor | None


class Checksum(msgspec.Struct, frozen=True, tag="checksum", forbid_unknown_fields=True):
    """Of the weights."""


class CarryOut(msgspec.Struct, frozen=True, tag="carry_out", forbid_unknown_fields=True):
    """A publication's order."""

    order: Order


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    pass


ToDo = Load | LoadVersion | Step | Save | Checksum | CarryOut | Leave


class Orders:
    """One end, in the order in which they were given. Its process is in the default group."""

    def __init__(self, store: Any) -> None:
        self._store, self._codec = store, Codec(ToDo)
        self.given = 0

    def give(self, order: ToDo) -> int:
        """On rank 0. The number of the order."""
        frames = [np.frombuffer(bytes_of(frame), np.uint8) for frame in self._codec.encode(order)]
        number, self.given = self.given, self.given + 1
        self._store.set(_key(number), msgspec.json.encode([len(frame) for frame in frames]).decode())
        dist.broadcast(torch.from_numpy(np.concatenate(frames)), 0)
        return number

    def take(self) -> ToDo:
        """On the others: the next one, whenever it comes. RuntimeError where the leading rank is gone."""
        number, self.given = self.given, self.given + 1
        while not _there(self._store, _key(number)):
            pass
        sizes = msgspec.json.decode(self._store.get(_key(number)), type=list[int])
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, 0)
        frames = [part.numpy().data for part in torch.split(flat, sizes)]
        order: ToDo = self._codec.decode(frames)
        return order


def _key(number: int) -> str:
    return f"order/{number}"


def _there(store: Any, key: str) -> bool:
    """Whether it is within a while. A connection that is gone raises DistNetworkError."""
    try:
        store.wait([key], POLL)
    except dist.DistStoreError:
        return False
    return True
