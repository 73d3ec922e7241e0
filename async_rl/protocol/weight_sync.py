"""The relay's messages. A publication over shared memory: Offer -> Slot -> the trainer writes it -> Commit -> Visible;
over a network or a file system: Offer -> Slot -> Receive -> the bytes come -> Seal -> Visible.

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


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Of the tensor with index `tensor` in a layout the elements from `low` to before `high`, in every dimension."""

    tensor: int
    low: list[int]
    high: list[int]


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Every rank writes its pieces into the slot at `path` itself."""

    path: str


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A torch.distributed group of two between each rank and each relay, formed over the store at (host, port). A
    broken group is never mended: the next `generation` replaces it."""

    host: str
    port: int
    generation: int
    device: str  # gloo, NCCL or HCCL follows from its kind
    operation_s: float


class Folder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A safetensors file of each rank in the folder `path`."""

    path: str


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rank brings what of one version, and how."""

    version: int
    epoch: int  # of the trainer
    nbytes: int  # of the slot
    tensors: list[TensorEntry]
    pieces: list[list[Piece]]  # by rank; together they are all tensors, each element once
    bucket_bytes: int
    base: int  # only what differs from this version comes; -1: all
    way: Shared | Links | Folder
    lora: LoRAInfo | None = None  # what the tensors are, where they are adapters


class Fence(Message, frozen=True):
    """A trainer of `epoch` began: what older ones publish is refused from here on. Answered with Done."""

    epoch: int


class Offer(Message, frozen=True):
    """The trainer has a version to publish and needs a slot of `nbytes`. `base`: what a delta could build on."""

    version: int
    epoch: int
    nbytes: int
    base: int = -1


class Slot(Message, frozen=True):
    """Write here. `have`: this version is visible already and nothing need be written. `base`: the offered one is
    there to build on. `incarnation`: a random id of the relay's process, which knows no group of an earlier one's."""

    path: str
    have: bool = False
    base: bool = False
    incarnation: str = ""


class Commit(Message, frozen=True):
    """The slot at `path` holds what `manifest` says. Also the trainer's announcement, again and again: a
    relay that has the version says so, one that started anew verifies the slot and makes it visible."""

    manifest: Manifest
    path: str


class Receive(Message, frozen=True):
    """Take `delivery` into the slot at `path`. Answered with Done when the relay is ready for the first byte."""

    delivery: Delivery
    path: str


class Seal(Message, frozen=True):
    """All of the delivery is sent. `checksums`: by rank those of its parcels (async_rl/weights/parcels.py)."""

    version: int
    epoch: int
    checksums: list[list[int]]


class Announce(Message, frozen=True):
    """What a trainer of `epoch` published last. Answered with Visible: that version, or the one that is."""

    version: int
    epoch: int


class Visible(Message, frozen=True):
    """`version` -1: none, or none of the trainer that asks."""

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


WeightSyncRequest = Fence | Offer | Commit | Receive | Seal | Announce | Fetch | Release | ControlRequest
WeightSyncReply = Slot | Visible | Rejected | Weights | NoNewer | Released | ControlReply
