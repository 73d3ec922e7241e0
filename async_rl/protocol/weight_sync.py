"""The relay's messages. A publication: Offer -> the trainer writes the slot -> Commit -> visible.

The manifest tells everything about the bytes; a receiver trusts nothing that its checksums do not confirm.
"""

import msgspec

from async_rl.protocol.base import Message
from async_rl.protocol.control import ControlReply, ControlRequest


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stored tensor. `aliases`: further names that share its storage (tied embeddings)."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: list[int]
    offset: int  # bytes, from the start of the slot; 64-byte aligned
    nbytes: int
    aliases: list[str] = []


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: int
    nbytes: int
    checksum: int  # xxh3_64


class LoRAInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors are low-rank adapters, named as in peft's files: A [rank, in] and B [out, rank] of each layer, whose
    weight is that of the base + alpha / rank * B A."""

    rank: int
    alpha: float
    targets: list[str]  # last parts of the layers' names


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    epoch: int  # of the trainer; older ones are refused
    nbytes: int
    tensors: list[TensorEntry]
    buckets: list[Bucket]
    lora: LoRAInfo | None = None  # None: the whole model


class Fence(Message, frozen=True):
    """A trainer of `epoch` began: what older ones publish is refused from here on. Answered with Done."""

    epoch: int


class Offer(Message, frozen=True):
    """The trainer has a version to publish and needs a slot of `nbytes`."""

    version: int
    epoch: int
    nbytes: int


class Slot(Message, frozen=True):
    """Write here. `have`: this version is visible already and nothing need be written."""

    path: str
    have: bool = False


class Commit(Message, frozen=True):
    """The slot at `path` holds what `manifest` says. Also the trainer's announcement, again and again: a
    relay that has the version says so, one that started anew verifies the slot and makes it visible."""

    manifest: Manifest
    path: str


class Visible(Message, frozen=True):
    version: int


class Rejected(Message, frozen=True):
    """The publication did not become visible; receivers stay on the version they had."""

    reason: str


class Fetch(Message, frozen=True):
    """Ask for weights newer than `have` (-1: none); waits up to `wait_s`."""

    worker: str
    incarnation: str
    have: int
    wait_s: float


class Weights(Message, frozen=True):
    """Map `path` and read; then Release(ticket). The slot is not overwritten while the ticket holds."""

    manifest: Manifest
    path: str
    ticket: int


class NoNewer(Message, frozen=True):
    newest: int


class Release(Message, frozen=True):
    """Reading is over."""

    worker: str
    ticket: int


class Released(Message, frozen=True):
    """`valid` False: the slot was taken back while it was read (a reader past its deadline); fetch again."""

    valid: bool


WeightSyncRequest = Fence | Offer | Commit | Fetch | Release | ControlRequest
WeightSyncReply = Slot | Visible | Rejected | Weights | NoNewer | Released | ControlReply
