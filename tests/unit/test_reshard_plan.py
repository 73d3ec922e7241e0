"""The reshard plan against gather-then-slice, over random parameters, meshes of trainer ranks and engine layouts."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import PublicationError
from async_rl.weights import layouts
from async_rl.weights.boxes import Box, merged
from async_rl.weights.plan import Parameter, Shard, Want, copies, plan, report, wants_of

ITEMSIZE = 4
HEAD = 2  # head size


class Mesh:
    """Ranks of a trainer: pipeline stages x replicas x FSDP shards x tensor parallel parts."""

    def __init__(self, stages, replicas, shards, parts):
        self.sizes = (stages, replicas, shards, parts)
        self.places = list(itertools.product(*map(range, self.sizes)))

    def held(self, name, shape, stage, cut):
        """Shards of a parameter of `stage`. cut: the dimension of tensor parallelism; None: alike on every part."""
        for rank, (own, _, shard, part) in enumerate(self.places):
            if own != stage % self.sizes[0]:
                continue
            box = Box.whole(shape)
            if cut is not None:
                box = box.chunk(cut, self.sizes[3], part)
            if shape:
                box = box.chunk(0, self.sizes[2], shard)
            yield Shard(rank, name, box)


@st.composite
def cases(draw):
    """Parameters, what ranks hold of them, and targets with what they ought to hold."""
    mesh = Mesh(*(draw(st.integers(1, n)) for n in (2, 3, 3, 2)))
    tp = draw(st.integers(1, 3))
    parameters, shards, targets, expected = {}, [], [], []
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    full = {}

    def parameter(shape, dims):
        name = f"p{len(parameters)}"
        parameters[name] = Parameter(tuple(shape), ITEMSIZE)
        full[name] = random.standard_normal(shape).astype(np.float32)
        cut = draw(st.sampled_from([None, *dims]))
        shards.extend(mesh.held(name, tuple(shape), draw(st.integers(0, 3)), cut))
        return name

    def size():
        return draw(st.integers(1, 7))

    def add(make, want):
        for rank in range(tp):
            targets.append(make(rank)._replace(name=f"t{len(targets)}"))
            expected.append(want(rank))

    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)):
        hidden = size()
        if kind == "whole":
            shape = [size() for _ in range(draw(st.integers(0, 3)))]
            p = parameter(shape, range(len(shape)))
            add(lambda r, p=p, shape=shape: layouts.whole("", p, shape), lambda r, p=p: full[p])
        elif kind == "rows":
            shapes = [(tp * size(), hidden) for _ in range(draw(st.integers(1, 3)))]
            names = [parameter(shape, (0, 1)) for shape in shapes]
            below = list(zip(names, shapes, strict=True))
            add(
                lambda r, below=below: layouts.rows("", below, r, tp),
                lambda r, names=names: np.concatenate([np.split(full[p], tp)[r] for p in names]),
            )
        elif kind == "columns":
            shape = (hidden, tp * size())
            p = parameter(shape, (0, 1))
            add(
                lambda r, p=p, shape=shape: layouts.columns("", p, shape, r, tp),
                lambda r, p=p: np.split(full[p], tp, axis=1)[r],
            )
        elif kind == "qkv":
            kv = draw(st.sampled_from([1, tp, 2 * tp]))
            heads = kv * tp * draw(st.integers(1, 2))
            rest = draw(st.sampled_from([(), (hidden,)]))
            names = [parameter((n * HEAD, *rest), (0,)) for n in (heads, kv, kv)]

            def joined(r, names=names, heads=heads, kv=kv):
                q, k, v = (full[p] for p in names)
                first = r if kv >= tp else 0  # with one head of k and v, every rank holds that one
                share = min(kv, tp)
                return np.concatenate([np.split(q, tp)[r], np.split(k, share)[first], np.split(v, share)[first]])

            add(
                lambda r, names=names, rest=rest, heads=heads, kv=kv: layouts.fused_qkv(
                    "", names, rest, heads=heads, kv_heads=kv, head_size=HEAD, rank=r, ranks=tp
                ),
                joined,
            )
        elif kind == "vocabulary":
            shape, multiple = (draw(st.integers(1, 20)), hidden), draw(st.integers(1, 4))
            p = parameter(shape, (0, 1))
            rows = -(-shape[0] // (multiple * tp)) * multiple * tp
            add(
                lambda r, p=p, s=shape, m=multiple: layouts.vocabulary("", p, s, r, tp, multiple=m),
                lambda r, p=p, s=shape, n=rows: np.split(np.pad(full[p], ((0, n - s[0]), (0, 0))), tp)[r],
            )
        elif kind == "experts":
            inner = tp * size()
            each = [[parameter((inner, hidden), (0, 1)) for _ in range(2)] for _ in range(draw(st.integers(1, 3)))]
            add(
                lambda r, each=each, s=(inner, hidden): layouts.experts(
                    "", [[(p, s) for p in names] for names in each], dim=0, rank=r, ranks=tp
                ),
                lambda r, each=each: np.stack(
                    [np.concatenate([np.split(full[p], tp)[r] for p in names]) for names in each]
                ),
            )
        elif kind == "quantised":
            shape, block = (tp * size(), hidden), (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
            p = parameter(shape, (0, 1))
            add(
                lambda r, p=p, s=shape, b=block: layouts.quantised(layouts.rows("", [(p, s)], r, tp), b, {p: s}),
                lambda r, p=p: np.split(full[p], tp)[r],
            )
    hosts = [f"host{n}" for n in range(draw(st.integers(1, 3)))]
    at = {host: draw(st.lists(st.sampled_from(targets), unique_by=lambda t: t.name, max_size=8)) for host in hosts}
    content = {target.name: array for target, array in zip(targets, expected, strict=True)}
    return parameters, shards, at, full, content, draw(st.sampled_from([8, 64, 2**20]))


KINDS = ["whole", "rows", "columns", "qkv", "vocabulary", "experts", "quantised"]


@settings(max_examples=3000, deadline=None)
@given(cases())
def test_what_the_plan_delivers_is_gather_then_slice(case):
    parameters, shards, at, full, content, largest = case
    wants = [want for host, targets in at.items() for want in wants_of(host, targets)]
    pieces = plan(parameters, shards, wants, largest=largest)

    holds = {
        (s.rank, s.parameter, s.box): full[s.parameter][s.box.inside(Box.whole(parameters[s.parameter].shape))].copy()
        for s in shards
    }
    arrived = defaultdict(dict)  # host -> piece -> what a rank has sent of what it holds
    for piece in pieces:
        local = holds[piece.rank, piece.parameter, piece.shard]
        arrived[piece.host][piece] = local[piece.box.inside(piece.shard)]
        assert arrived[piece.host][piece].nbytes == piece.nbytes <= max(largest, ITEMSIZE)
    for host, targets in at.items():
        for target in targets:
            made = np.zeros(target.shape, np.float32)
            for copy in copies(target, arrived[host]):
                made[copy.target] = arrived[host][copy.piece][copy.source]
            np.testing.assert_array_equal(made, content[target.name])

    # No byte twice to a host, and none that it does not want.
    for host in at:
        times = {name: np.zeros(p.shape, int) for name, p in parameters.items()}
        wanted = {name: np.zeros(p.shape, bool) for name, p in parameters.items()}
        for piece in arrived[host]:
            times[piece.parameter][piece.box.inside(Box.whole(parameters[piece.parameter].shape))] += 1
        for want in wants:
            if want.host == host:
                wanted[want.parameter][want.box.inside(Box.whole(parameters[want.parameter].shape))] = True
        for name in parameters:
            np.testing.assert_array_equal(times[name], wanted[name])

    # The same plan on every side, whatever the order in which a side was told.
    assert plan(parameters, shards[::-1], wants[::-1], largest=largest) == pieces


@settings(max_examples=500, deadline=None)
@given(cases())
def test_the_load_is_even_over_the_replicas_that_can_carry_it(case):
    """Against the optimum of the same pieces if they could be cut at will: the largest average over any ranks of what
    those alone can send (max-flow min-cut)."""
    parameters, shards, at, _, _, largest = case
    wants = [want for host, targets in at.items() for want in wants_of(host, targets)]
    pieces = plan(parameters, shards, wants, largest=largest)
    found = report(pieces, shards, bucket_bytes=100)
    if not pieces:
        assert found.nbytes == found.messages == found.largest_link == found.lower_bound == 0
        return
    can = [{s.rank for s in shards if s.parameter == p.parameter and s.box.holds(p.box)} for p in pieces]
    ranks = sorted(set().union(*can))
    some = (
        [set(c) for n in range(1, len(ranks) + 1) for c in itertools.combinations(ranks, n)] if len(ranks) < 9 else can
    )
    best = max(sum(p.nbytes for p, own in zip(pieces, can, strict=True) if own <= few) / len(few) for few in some)
    sent = Counter()
    for piece in pieces:
        sent[piece.rank] += piece.nbytes
    assert max(sent.values()) <= max(1.1 * best, best + max(p.nbytes for p in pieces))
    assert found.sent == sent and found.nbytes == sum(sent.values()) == sum(found.received.values())
    assert found.lower_bound == max(math.ceil(best), *found.received.values()) <= found.largest_link
    assert found.messages >= len({(p.rank, p.host) for p in pieces})


def test_replicas_share_a_large_tensor():
    """Four replicas of one embedding, three hosts: each replica sends a quarter of it all."""
    shape = (1024, 64)
    shards = [Shard(rank, "embed", Box.whole(shape)) for rank in range(4)]
    wants = [Want(host, "embed", Box.whole(shape)) for host in "abc"]
    pieces = plan({"embed": Parameter(shape, 2)}, shards, wants, largest=2**12)
    found = report(pieces, shards, bucket_bytes=2**14)
    assert set(found.sent.values()) == {3 * 1024 * 64 * 2 // 4}
    assert set(found.received.values()) == {1024 * 64 * 2}
    assert found.largest_link == found.lower_bound == 1024 * 64 * 2


def test_two_engines_of_a_host_cost_one():
    """Tensor parallel 2 and a second engine with the whole: the host gets the tensor once, in the pieces of FSDP."""
    shape = (8, 4)
    shards = [Shard(rank, "w", Box.whole(shape).chunk(0, 4, rank)) for rank in range(4)]
    targets = [layouts.columns("a0", "w", shape, 0, 2), layouts.columns("a1", "w", shape, 1, 2)]
    pieces = plan({"w": Parameter(shape, 4)}, shards, wants_of("h", [*targets, layouts.whole("b", "w", shape)]))
    assert [piece.box for piece in pieces] == [shard.box for shard in shards]


@pytest.mark.parametrize(
    ("shards", "wants", "says"),
    [
        (
            [Shard(0, "w", Box((0, 0), (4, 4)))],
            [Want("h", "w", Box((2, 0), (6, 4)))],
            r"w: \[4:6, 0:4\] is wanted by h",
        ),
        ([Shard(0, "v", Box((0,), (4,)))], [], "rank 0 holds v, which is no parameter of the model"),
        ([], [Want("h", "w", Box((0, 0), (9, 4)))], r"h wants \[0:9, 0:4\] of w, whose shape is \[8, 4\]"),
        ([Shard(3, "w", Box((0,), (4,)))], [], r"rank 3 holds \[0:4\] of w"),
    ],
)
def test_what_cannot_be_planned_is_one_line(shards, wants, says):
    with pytest.raises(PublicationError, match=says):
        plan({"w": Parameter((8, 4), 4)}, shards, wants)


def test_what_engines_cannot_cut_is_one_line():
    with pytest.raises(PublicationError, match="dimension 0 of \\[7, 2\\] cannot be cut for 2 ranks"):
        layouts.rows("t", [("w", (7, 2))], 0, 2)
    with pytest.raises(PublicationError, match="6 heads and 3 of k and v cannot be cut for 2 ranks"):
        layouts.fused_qkv("t", "qkv", (4,), heads=6, kv_heads=3, head_size=2, rank=0, ranks=2)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 4))
def test_chunks_are_those_of_torch(rows, width, parts, index):
    chunks = torch.arange(rows * width).reshape(rows, width).chunk(parts)
    box = Box.whole((rows, width)).chunk(0, parts, index)
    assert box.shape == (tuple(chunks[index].shape) if index < len(chunks) else (0, width))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40))
def test_the_parts_of_a_box_tile_it(rows, width, most):
    whole = Box.whole((rows, width))
    parts = whole.pieces(most)
    assert all(part.size <= most for part in parts)
    assert sum(part.size for part in parts) == whole.size
    assert merged(parts) == [whole]
