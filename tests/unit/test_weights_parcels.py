"""How pieces become messages: every byte once, none unaligned, and a delta that is never silently wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.protocol.weight_sync import Bucket, Delivery, Piece, Shared
from async_rl.weights.boxes import Box
from async_rl.weights.delta import block_sums, gather, scatter, size
from async_rl.weights.manifest import ALIGNMENT, DTYPE_BYTES, layout
from async_rl.weights.parcels import BLOCK, coverage_problem, loads, parcels, run, tiles
from async_rl.weights.sending import messages_of

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3)
models = st.lists(st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "uint8"])), min_size=1, max_size=6)


def cut(entries, ranks, dim):
    """Each tensor cut along its `dim`th dimension, as ranks hold it."""
    pieces = [[] for _ in range(ranks)]
    for index, entry in enumerate(entries):
        whole = Box.whole(entry.shape)
        for rank in range(ranks):
            box = whole.chunk(dim % len(entry.shape), ranks, rank) if entry.shape else whole
            if box.size and (entry.shape or not rank):
                pieces[rank].append(Piece(index, list(box.low), list(box.high)))
    return pieces


@given(models, st.integers(1, 4), st.integers(0, 2), st.integers(1, 200))
def test_parcels_carry_every_byte_of_the_slot_once_and_each_fits_its_bucket(model, ranks, dim, bucket_bytes):
    laid = layout([(str(k), [], dtype, shape) for k, (shape, dtype) in enumerate(model)], 1000)
    covered = np.zeros(laid.nbytes, dtype=int)
    for own in cut(laid.tensors, ranks, dim):
        for parcel in parcels(laid.tensors, own, bucket_bytes):
            assert parcel.nbytes <= max(bucket_bytes, 4)
            at = 0
            for place in parcel.places:
                entry = laid.tensors[place.tensor]
                itemsize = DTYPE_BYTES[entry.dtype]
                assert place.at == at and place.at % itemsize == 0
                at += place.nbytes
                index = np.arange(entry.nbytes).reshape(*entry.shape, itemsize)[
                    place.box.inside(Box.whole(entry.shape))
                ]
                covered[entry.offset + index.reshape(-1)] += 1
                if parcel.offset is not None:
                    first = entry.offset + int(index.reshape(-1)[0])
                    assert parcel.offset == first
                    assert (np.diff(index.reshape(-1)) == 1).all()
            assert at == parcel.nbytes
    expected = np.zeros(laid.nbytes, dtype=int)
    for entry in laid.tensors:
        expected[entry.offset : entry.offset + entry.nbytes] = 1
    assert (covered == expected).all()


def test_a_part_of_rows_is_one_run_and_a_part_of_columns_is_none():
    (entry,) = layout([("w", [], "float32", [6, 4])], 1000).tensors
    assert run(entry, Box((2, 0), (5, 4))) == entry.offset + 2 * 4 * 4
    assert run(entry, Box((2, 1), (3, 3))) == entry.offset + (2 * 4 + 1) * 4
    assert run(entry, Box((0, 1), (6, 3))) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=6), st.integers(1, 300))
def test_buckets_around_known_ones_tile_the_slot(known, bucket_bytes):
    buckets, end = [], 0
    for gap, nbytes in known:
        start = -(-(end + gap) // ALIGNMENT) * ALIGNMENT
        buckets.append(Bucket(start, nbytes, 0))
        end = start + nbytes
    found = tiles(end + 70, buckets, bucket_bytes)
    assert {(b.offset, b.nbytes) for b in buckets} <= set(found)
    at = 0
    for offset, nbytes in found:
        assert offset == at and nbytes > 0
        at += nbytes
    assert at == end + 70


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_messages_of_a_delta_carry_each_part_once_in_order(sizes, most):
    parts = [part for _, load in messages_of(sizes, most) for part in load]
    assert [k for k, _ in parts] == [k for k, nbytes in enumerate(sizes) if nbytes]
    for nbytes, load in messages_of(sizes, most):
        assert nbytes == sum(sizes[k] for k, _ in load)
        assert nbytes <= most or len(load) == 1
    assert loads([], most) == []


@given(st.integers(1, 5 * BLOCK + 7), st.data())
def test_what_is_gathered_from_one_version_and_scattered_over_the_other_makes_them_equal(nbytes, data):
    old = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    new = old.clone()
    for at in data.draw(st.lists(st.integers(0, nbytes - 1), max_size=4)):
        new[at] += 1
    mask = block_sums(memoryview(new.numpy())) != block_sums(memoryview(old.numpy()))
    assert list(np.flatnonzero(mask)) == sorted({int(at) // BLOCK for at in np.flatnonzero((new != old).numpy())})
    blocks = torch.empty(size(mask, nbytes), dtype=torch.uint8)
    gather(new, mask, blocks)
    scatter(old, mask, blocks)
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([[Piece(0, [0, 0], [3, 2])]], "w: 24 of 32 bytes are to come"),
        ([[Piece(0, [0, 0], [5, 2])]], "a piece from"),
        ([[Piece(0, [0], [4])]], "a piece from"),
        ([[Piece(1, [0, 0], [4, 2])]], "tensor 1 of 1"),
        ([[Piece(0, [0, 0], [2, 2])], [Piece(0, [2, 0], [4, 2])]], ""),
    ],
)
def test_a_delivery_that_leaves_older_bytes_in_the_slot_is_found_out(pieces, said):
    laid = layout([("w", [], "float32", [4, 2])], 1000)
    problem = coverage_problem(Delivery(0, 1, laid.nbytes, laid.tensors, pieces, 1000, -1, Shared("")))
    assert said in problem and bool(problem) == bool(said)
