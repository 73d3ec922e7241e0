"""Where each tensor of a model lies in a slot, and what a receiver checks before it trusts the bytes.

Tensors that share storage (tied embeddings) are stored once; their further names are aliases. Buckets are
spans of at most `bucket_bytes` that tile the slot, each with a checksum of its own.
"""

import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Bucket, Manifest, TensorEntry

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load
THREADS = 2  # that copy and sum: one alone does not fill a machine's memory channels
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

T = TypeVar("T")
U = TypeVar("U")
Buffer = bytes | bytearray | memoryview | mmap.mmap


class Layout(msgspec.Struct, frozen=True):
    """A manifest before it is sealed. `spans`: (offset, nbytes) of each bucket."""

    tensors: list[TensorEntry]
    spans: list[tuple[int, int]]
    nbytes: int


def layout(tensors: Iterable[tuple[str, Sequence[str], str, Sequence[int]]], bucket_bytes: int) -> Layout:
    """The layout of (name, aliases, dtype, shape) in that order. Raises PublicationError where there is no byte."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, aliases, dtype, shape in tensors:
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, list(shape), offset, nbytes, list(aliases)))
        offset = aligned(offset + nbytes)
    if not offset:
        raise PublicationError("a model without tensors cannot be published")
    end = max(entry.offset + entry.nbytes for entry in entries)
    return Layout(entries, spans(end, bucket_bytes), end)


def spans(nbytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of each bucket of a slot of `nbytes`; no bucket cuts an element in two."""
    step = max(bucket_bytes // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


def gaps(tensors: Sequence[TensorEntry]) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of the padding between tensors; zeroed, so that equal weights have equal checksums."""
    for before, after in itertools.pairwise(tensors):
        end = before.offset + before.nbytes
        if end < after.offset:
            yield end, after.offset - end


def clear_gaps(tensors: Sequence[TensorEntry], slot: mmap.mmap) -> None:
    """Whatever lay in the slot before."""
    for offset, nbytes in gaps(tensors):
        slot[offset : offset + nbytes] = bytes(nbytes)


def seal(
    layout: Layout,
    buffer: Buffer,
    *,
    version: int,
    epoch: int,
    known: Mapping[tuple[int, int], int] | None = None,
) -> Manifest:
    """The manifest of what `buffer` now holds: `layout` with the checksum of each bucket.

    known: (offset, nbytes) -> checksum, of the buckets that need not be read again.
    """
    view, known = memoryview(buffer), known or {}
    unknown = [span for span in layout.spans if span not in known]
    sums = {**known, **dict(zip(unknown, each(lambda span: _checksum(view, *span), unknown), strict=True))}
    buckets = [Bucket(at, size, sums[at, size]) for at, size in layout.spans]
    return Manifest(version, epoch, layout.nbytes, layout.tensors, buckets)


def check_buckets(manifest: Manifest, buffer: Buffer) -> list[int]:
    """Indices of the buckets whose bytes in `buffer` are not those that were published."""
    view = memoryview(buffer)

    def wrong(bucket: Bucket) -> bool:
        end = bucket.offset + bucket.nbytes
        return end > len(view) or _checksum(view, bucket.offset, bucket.nbytes) != bucket.checksum

    return [k for k, is_wrong in enumerate(each(wrong, manifest.buckets)) if is_wrong]


def each(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """`work` of every item, in THREADS threads: copies and checksums of megabytes hold no interpreter's lock."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items)), "weights") as pool:
        return list(pool.map(work, items))


def check_layout(manifest: Manifest) -> list[str]:
    """What is wrong with the manifest itself: one line each."""
    wrong: list[str] = []
    seen: set[str] = set()
    end = 0
    for entry in manifest.tensors:
        size = DTYPE_BYTES.get(entry.dtype)
        if size is None:
            wrong.append(f"{entry.name}: unknown dtype {entry.dtype}")
        elif any(n < 0 for n in entry.shape) or math.prod(entry.shape) * size != entry.nbytes:
            wrong.append(f"{entry.name}: {entry.nbytes} bytes are no {entry.dtype} of shape {entry.shape}")
        if entry.offset < end or entry.offset % ALIGNMENT or entry.offset + entry.nbytes > manifest.nbytes:
            wrong.append(f"{entry.name}: offset {entry.offset} overlaps, is unaligned or lies outside")
        end = max(end, entry.offset + entry.nbytes)
        for name in (entry.name, *entry.aliases):
            if name in seen:
                wrong.append(f"{name}: named twice")
            seen.add(name)
    covered = 0
    for bucket in manifest.buckets:
        if bucket.offset != covered or bucket.nbytes <= 0:
            wrong.append(f"the buckets leave a hole or overlap at byte {covered}")
            break
        covered += bucket.nbytes
    if covered != manifest.nbytes:
        wrong.append(f"the buckets cover {covered} of {manifest.nbytes} bytes")
    return wrong


def check_names(manifest: Manifest, expected: Mapping[str, Sequence[int]]) -> list[str]:
    """How the manifest's names and shapes differ from `expected` (name -> shape): one line each.

    Every expected name must be there, as a stored tensor or as an alias, and no other.
    """
    shapes = shapes_of(manifest)
    wrong = [f"{name}: missing" for name in expected if name not in shapes]
    wrong += [f"{name}: unexpected" for name in shapes if name not in expected]
    wrong += [
        f"{name}: shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    return wrong


def shapes_of(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shape of every name, aliases included."""
    return {name: tuple(e.shape) for e in manifest.tensors for name in (e.name, *e.aliases)}


def aliases_of(manifest: Manifest) -> dict[str, str]:
    """alias -> canonical name."""
    return {alias: entry.name for entry in manifest.tensors for alias in entry.aliases}


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _checksum(view: memoryview, offset: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(view[offset : offset + nbytes])


def views(tensors: Sequence[TensorEntry], buffer: Buffer) -> Iterator[tuple[str, "torch.Tensor"]]:
    """(canonical name, tensor on the CPU): views of the slot, to be copied from and not to be kept."""
    for entry in tensors:
        yield entry.name, view(entry, buffer)


def view(entry: TensorEntry, buffer: Buffer) -> "torch.Tensor":
    """The tensor in the slot `buffer`, without a copy."""
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
