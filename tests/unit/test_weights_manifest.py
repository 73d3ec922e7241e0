"""Where tensors lie in a slot, and what a receiver finds out before it trusts them."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Bucket, Delivery, Shared
from async_rl.weights import shm
from async_rl.weights.draft import draft, layout_of
from async_rl.weights.manifest import (
    ALIGNMENT,
    DTYPE_BYTES,
    aliases_of,
    check_buckets,
    check_layout,
    check_names,
    clear_gaps,
    gaps,
    seal,
    shapes_of,
    spans,
)
from async_rl.weights.source import Source


class Head(torch.nn.Module):
    """An embedding and a head, tied or not, with a fused projection and an odd-sized bias between them."""

    def __init__(self, tied, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6, dtype=dtype)
        self.qkv = torch.nn.Linear(6, 18, bias=False, dtype=dtype)
        self.bias = torch.nn.Parameter(torch.randn(7, dtype=dtype))
        self.lm_head = torch.nn.Linear(6, 11, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.tensor(2.5))
        if tied:
            self.lm_head.weight = self.embed.weight


def sealed(model, bucket_bytes=100, version=3):
    layout = layout_of(model, bucket_bytes)
    buffer = bytearray(layout.nbytes)
    return write(layout, model, buffer, version, bucket_bytes), buffer


def write(layout, model, buffer, version, bucket_bytes):
    """What a trainer of one rank does with a slot in shared memory."""
    pieces = draft(model, 1, ["relay"], bucket_bytes, None).pieces["relay"]
    delivery = Delivery(version, 1, layout.nbytes, layout.tensors, pieces, bucket_bytes, -1, Shared(""))
    clear_gaps(layout.tensors, buffer)
    sums = shm.write(delivery, 0, Source(model, layout.tensors), buffer)
    known = dict(zip(layout.spans, sums, strict=True))
    assert seal(layout, buffer, version=version, epoch=1, known=known) == seal(layout, buffer, version=version, epoch=1)
    return seal(layout, buffer, version=version, epoch=1, known=known)


@pytest.mark.parametrize("tied", [True, False])
def test_every_name_is_covered_and_tied_ones_are_stored_once(tied):
    # field report 29: the head's copy goes stale, or a redundant update raises a false alarm
    model = Head(tied)
    layout = layout_of(model, 64)
    manifest = seal(layout, bytearray(layout.nbytes), version=0, epoch=1)
    assert set(shapes_of(manifest)) == set(model.state_dict())
    assert aliases_of(manifest) == ({"lm_head.weight": "embed.weight"} if tied else {})
    assert len(manifest.tensors) == (4 if tied else 5)
    assert check_layout(manifest) == []
    assert check_names(manifest, {name: tensor.shape for name, tensor in model.state_dict().items()}) == []


def test_two_views_of_one_storage_that_differ_are_both_stored():
    model = torch.nn.Module()
    base = torch.arange(12.0)
    model.register_buffer("rows", base.view(3, 4))
    model.register_buffer("flat", base)
    manifest, _ = sealed(model)
    assert [entry.name for entry in manifest.tensors] == ["rows", "flat"]


def test_equal_values_in_storages_of_their_own_are_not_aliases():
    model = torch.nn.Module()
    model.register_buffer("a", torch.zeros(5))
    model.register_buffer("b", torch.zeros(5))
    assert aliases_of(sealed(model)[0]) == {}


def test_offsets_are_aligned_and_the_gaps_between_are_zero():
    manifest, buffer = sealed(Head(tied=False))
    assert all(entry.offset % ALIGNMENT == 0 for entry in manifest.tensors)
    assert list(gaps(manifest.tensors))
    assert all(not any(buffer[at : at + n]) for at, n in gaps(manifest.tensors))


def test_equal_weights_have_equal_checksums_whatever_lay_in_the_slot_before():
    model = Head(tied=True)
    layout = layout_of(model, 100)
    clean, dirty = bytearray(layout.nbytes), bytearray(b"\xff" * layout.nbytes)
    first = write(layout, model, clean, 1, 100)
    second = write(layout, model, dirty, 1, 100)
    assert first.buckets == second.buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_bytes_of_every_dtype_are_those_of_the_model(dtype):
    model = Head(tied=True, dtype=torch.float32).to(torch.float32)
    if dtype != torch.float32:
        model.bias = torch.nn.Parameter(model.bias.detach().to(dtype), requires_grad=False)
    manifest, buffer = sealed(model)
    entry = next(e for e in manifest.tensors if e.name == "bias")
    back = torch.frombuffer(buffer, dtype=dtype, count=7, offset=entry.offset)
    assert torch.equal(back.float(), model.bias.detach().float())


def test_no_torch_dtype_has_another_size_here():
    assert all(getattr(torch, name).itemsize == size for name, size in DTYPE_BYTES.items())


@given(st.integers(1, 5000), st.integers(1, 700))
def test_buckets_tile_the_slot(nbytes, bucket_bytes):
    covered = 0
    for offset, size in spans(nbytes, bucket_bytes):
        assert offset == covered
        assert 0 < size <= max(bucket_bytes, ALIGNMENT)
        assert offset % ALIGNMENT == 0
        covered += size
    assert covered == nbytes


@given(st.integers(0), st.integers(1, 255))
def test_one_changed_byte_is_found_in_its_bucket_and_nowhere_else(where, change):
    # field report 30: old or damaged weights while the logs look healthy
    manifest, buffer = sealed(Head(tied=True))
    at = where % manifest.nbytes
    buffer[at] ^= change
    assert check_buckets(manifest, buffer) == [at // ALIGNMENT]


def test_a_slot_that_is_too_short_fails_in_every_bucket_that_it_cuts():
    manifest, buffer = sealed(Head(tied=True))
    bad = check_buckets(manifest, buffer[: manifest.nbytes - 1])
    assert bad == [len(manifest.buckets) - 1]


def test_a_fused_projection_split_across_buckets_is_covered_by_all_of_them():
    # field report 28: fused projections split across chunks keep old weights silently
    model = Head(tied=False)
    manifest, buffer = sealed(model, bucket_bytes=128)
    entry = next(e for e in manifest.tensors if e.name == "qkv.weight")
    assert entry.nbytes > 3 * 128
    with torch.no_grad():
        model.qkv.weight.add_(1)
    fresh, _ = sealed(model, bucket_bytes=128)
    old = [bucket.checksum for bucket in manifest.buckets]
    changed = [k for k, bucket in enumerate(fresh.buckets) if bucket.checksum != old[k]]
    assert changed == list(range(entry.offset // 128, (entry.offset + entry.nbytes - 1) // 128 + 1))
    assert check_buckets(fresh, buffer) == changed


def changed(manifest, index, **fields):
    tensors = list(manifest.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **fields)
    return msgspec.structs.replace(manifest, tensors=tensors)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "complex64"}, "unknown dtype"),
        ({"shape": [11, 7]}, "are no float32 of shape"),
        ({"shape": [-11, -6]}, "are no float32 of shape"),
        ({"nbytes": 4}, "are no float32 of shape"),
        ({"offset": 8}, "unaligned"),
        ({"offset": -64}, "outside"),
        ({"offset": 2**40}, "outside"),
        ({"aliases": ["bias"]}, "bias: named twice"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found_out(fields, said):
    manifest, _ = sealed(Head(tied=False))
    index = next(k for k, e in enumerate(manifest.tensors) if e.name == "embed.weight")
    assert any(said in line for line in check_layout(changed(manifest, index, **fields)))


def test_buckets_with_a_hole_are_found_out():
    manifest, _ = sealed(Head(tied=False))
    for buckets in (manifest.buckets[1:], manifest.buckets[:-1], [*manifest.buckets, Bucket(0, 5, 0)], []):
        assert check_layout(msgspec.structs.replace(manifest, buckets=buckets))


def test_missing_unexpected_and_misshapen_names_are_each_one_line():
    manifest, _ = sealed(Head(tied=True))
    expected = {name: tensor.shape for name, tensor in Head(tied=True).state_dict().items()}
    del expected["bias"]
    expected["lm_head.weight"] = (11, 5)
    expected["norm.weight"] = (6,)
    assert check_names(manifest, expected) == [
        "norm.weight: missing",
        "bias: unexpected",
        "lm_head.weight: shape [11, 6], expected [11, 5]",
    ]


def test_what_has_no_bytes_cannot_be_planned():
    with pytest.raises(PublicationError, match="without tensors"):
        layout_of(torch.nn.Module(), 100)
    with pytest.raises(PublicationError, match="meta"):
        layout_of(torch.nn.Linear(2, 2, device="meta"), 100)
    with pytest.raises(PublicationError, match="complex64"):
        layout_of(torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), 100)
