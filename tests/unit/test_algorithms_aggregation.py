"""Aggregations against plain means over lists; global denominators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.aggregation import Totals, weighted_sum
from async_rl.algorithms.registry import AGGREGATIONS

HORIZON = 7
REFERENCE = {
    "token-mean": lambda kept: sum(map(sum, kept)) / max(sum(map(len, kept)), 1),
    "token-sum": lambda kept: sum(map(sum, kept)),
    "seq-mean-token-sum": lambda kept: _mean([sum(s) for s in kept if s]),
    "seq-mean-token-mean": lambda kept: _mean([sum(s) / len(s) for s in kept if s]),
    "seq-mean-token-sum-norm": lambda kept: _mean([sum(s) / HORIZON for s in kept if s]),
}


def _mean(values):
    return sum(values) / len(values) if values else 0.0


def totals_of(sequences):
    kept = [sum(inside for _, inside in sequence) for sequence in sequences]
    return Totals(sum(kept), sum(count > 0 for count in kept))


def aggregate(name, sequences, totals=None):
    """`sequences`: lists of (loss, whether it is in the mask)."""
    flat = [token for sequence in sequences for token in sequence]
    values = torch.tensor([value for value, _ in flat], dtype=torch.float64)
    mask = torch.tensor([float(inside) for _, inside in flat], dtype=torch.float64)
    index = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence], dtype=torch.int64)
    weights = AGGREGATIONS[name](mask, index, len(sequences), totals or totals_of(sequences), HORIZON)
    return float(weighted_sum(values, weights))


batches = st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
@given(sequences=batches)
def test_agrees_with_means_over_lists(name, sequences):
    kept = [[value for value, inside in sequence if inside] for sequence in sequences]
    assert aggregate(name, sequences) == pytest.approx(REFERENCE[name](kept), abs=1e-9)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
@given(sequences=batches)
def test_parts_add_up_to_the_whole(name, sequences):
    """Field report 19: the denominators are the update's, so nothing is normalised twice."""
    totals = totals_of(sequences)
    parts = sum(aggregate(name, [sequence], totals) for sequence in sequences)
    assert parts == pytest.approx(aggregate(name, sequences), abs=1e-9)


def test_two_ranks_share_one_denominator():
    """Field report 18: two tokens of loss 1 here, six of loss 0 there: 0.25, not 0.5."""
    a, b = [[(1.0, True)] * 2], [[(0.0, True)] * 6]
    totals = totals_of(a + b)
    assert aggregate("token-mean", a, totals) + aggregate("token-mean", b, totals) == 0.25


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean"])
def test_masked_completions_leave_numerator_and_denominator(name):
    """Field report 20: lengths 4 (ended) and 4 (truncated, masked), loss 1 each: the mean is 1.0."""
    assert aggregate(name, [[(1.0, True)] * 4, [(1.0, False)] * 4]) == 1.0


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_all_masked_is_zero_and_never_nan(name):
    """Field report 20."""
    assert aggregate(name, [[(1.0, False)] * 4, [(float("nan"), False)]]) == 0.0
