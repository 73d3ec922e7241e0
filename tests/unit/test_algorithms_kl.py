"""Mismatch figures against exact sums over a small vocabulary."""

import math

import pytest
import torch

from async_rl.algorithms.kl import Mismatch, mismatch


def test_an_unchanged_policy_reads_zero_divergence_and_ratio_one():
    lp = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    same = mismatch(lp, lp, torch.zeros(3, dtype=torch.int64))
    assert (same.k1, same.k3, same.mean_ratio, same.max_ratio, same.effective_sample_size) == (0, 0, 1, 1, 1)


def test_both_estimates_have_the_divergence_as_their_mean():
    behaviour, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((behaviour * (behaviour / trainer).log()).sum())
    counts = (behaviour * 10).round().to(torch.int64)  # each token as often as the behaviour policy samples it
    figures = mismatch(
        trainer.log().repeat_interleave(counts),
        behaviour.log().repeat_interleave(counts),
        torch.zeros(10, dtype=torch.int64),
    )
    assert figures.k1 == pytest.approx(exact, abs=1e-6)
    assert figures.k3 == pytest.approx(exact, abs=1e-6)
    assert figures.mean_ratio == pytest.approx(1.0, abs=1e-6)


def test_effective_sample_size_is_a_share():
    lp = torch.log(torch.tensor([4.0, 1e-9, 1e-9, 1e-9]))
    figures = mismatch(lp, torch.zeros(4), torch.zeros(4, dtype=torch.int64))
    assert figures.effective_sample_size == pytest.approx(0.25, abs=1e-6)


def test_by_lag_and_parts_add_up():
    torch.manual_seed(0)
    lp, behaviour, lag = -torch.rand(50), -torch.rand(50), torch.randint(0, 4, (50,))
    whole = mismatch(lp, behaviour, lag)
    cut = mismatch(lp[:20], behaviour[:20], lag[:20]) + mismatch(lp[20:], behaviour[20:], lag[20:])
    torch.testing.assert_close(whole.sums, cut.sums)
    assert whole.max_ratio == cut.max_ratio
    at_two = mismatch(lp[lag == 2], behaviour[lag == 2], lag[lag == 2])
    assert whole.by_lag()[2] == pytest.approx((at_two.k1, at_two.k3))


def test_nothing_measured_is_not_a_number():
    assert math.isnan(Mismatch.none().k3) and Mismatch.none().by_lag() == {}
