"""Work over ranks."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.services.trainer.balance import balanced
from async_rl.services.trainer.packing import shared_out
from tests.unit.trainer_material import random_samples, sample, trajectory

costs = st.lists(st.floats(0, 100), max_size=7)


def sums(given, lists):
    return [sum(given[position] for position in members) for members in lists]


@settings(max_examples=300, deadline=None)
@given(costs, st.integers(1, 4))
def test_each_position_once_and_near_the_optimum(given, parts):
    """4/3 - 1/(3 parts) of the optimum (Michiels et al. 2007), here found by trying all."""
    lists = balanced(given, parts)
    assert len(lists) == parts
    assert sorted(itertools.chain.from_iterable(lists)) == list(range(len(given)))
    assert all(members == sorted(members) for members in lists)
    assert balanced(given, parts) == lists
    best = min(
        max(sum(cost for cost, part in zip(given, places, strict=True) if part == p) for p in range(parts))
        for places in itertools.product(range(parts), repeat=len(given))
    )
    assert max(sums(given, lists)) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


def test_differencing_beats_taking_turns():
    """Long-tailed lengths, 256 over 8 ranks: within 2 % of even; taking turns leaves the slowest far behind."""
    random = np.random.default_rng(0)
    long_tail = np.minimum(200 * np.exp(1.2 * random.standard_normal(256)), 8192).tolist()
    even = sum(long_tail) / 8
    turns = [list(range(rank, 256, 8)) for rank in range(8)]
    assert max(sums(long_tail, balanced(long_tail, 8))) < 1.02 * even
    assert max(sums(long_tail, turns)) > 1.1 * even


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**16), st.integers(0, 12), st.integers(1, 4), st.integers(4, 60))
def test_every_sample_has_one_rank(seed, count, ranks, capacity):
    given = random_samples(count, seed)
    numbers = {id(one): number for number, one in enumerate(given)}
    found = [[numbers[id(one)] for one in share] for share in shared_out(given, ranks, capacity, 16)]
    assert sorted(itertools.chain.from_iterable(found)) == list(range(count))


def test_a_group_that_fits_stays_together():
    groups = [[sample(trajectory([g, 1, 2, 3], [m, m, m])) for m in range(4)] for g in range(4)]
    found = shared_out([one for group in groups for one in group], 2, 64, 16)
    assert [len({int(one.prompt[0]) for one in share}) for share in found] == [2, 2]


def test_a_long_sequence_weighs_by_its_attention():
    """One of 1,024 tokens among 48 of 64. With narrow states its attention outweighs all of them; with wide ones
    tokens count alone, and its rank has a third of them, too."""
    long = sample(trajectory([0], [1] * 1023))
    short = [sample(trajectory([k % 13, k], [2] * 62)) for k in range(48)]
    for width, together in ((16, 1), (10**6, 17)):
        found = shared_out([long, *short], 2, 64, width)
        assert [len(share) for share in found if any(one is long for one in share)] == [together]
