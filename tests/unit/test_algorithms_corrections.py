"""Weights, rejections and the log-linear proximal policy, where the golden vectors do not reach."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.corrections import importance_weights, loglinear_old, rejected
from async_rl.algorithms.kl import adapted, penalty
from async_rl.config.algorithms import KL, M2PO, OPSM, Reject, Weights

log_ratios = st.lists(st.floats(-20, 20), min_size=1, max_size=30)


def one_sequence(log_r):
    values = torch.tensor(log_r, dtype=torch.float64)
    return values, torch.ones(len(values), dtype=torch.bool), torch.zeros(len(values), dtype=torch.int64)


def test_truncated_weights_and_a_band():
    log_r, loss, sequence = one_sequence([math.log(r) for r in (0.1, 0.6, 1.0, 1.9, 5.0)])
    cut = importance_weights(log_r, loss, sequence, 1, Weights(cap=2.0))
    assert cut.tolist() == pytest.approx([0.1, 0.6, 1.0, 1.9, 2.0])
    band = importance_weights(log_r, loss, sequence, 1, Weights(band=(0.5, 2.0)))
    assert band.tolist() == pytest.approx([0, 0.6, 1.0, 1.9, 0])
    free = importance_weights(log_r, loss, sequence, 1, Weights(cap=None))
    assert free.tolist() == pytest.approx([0.1, 0.6, 1.0, 1.9, 5.0])


@given(log_ratios)
def test_weights_are_finite_and_have_mean_one_where_normalised(log_r):
    values, loss, sequence = one_sequence(log_r)
    for level in ("token", "sequence"):
        weights = importance_weights(values, loss, sequence, 1, Weights(level=level, cap=None, normalize=True))
        assert torch.isfinite(weights).all()
        if values.exp().mean() > 1e-8 and (level == "token" or values.sum() > -18):
            assert weights.mean().item() == pytest.approx(1.0)


@given(log_ratios, st.floats(1e-4, 4.0))
def test_m2po_leaves_the_most_tokens_that_keep_the_second_moment(log_r, tau):
    values, loss, sequence = one_sequence(log_r)
    out = rejected(values, torch.zeros_like(values), loss, sequence, 1, M2PO(tau=tau))
    kept = (values[~out] ** 2).sort().values
    assert not len(kept) or kept.mean() <= tau + 1e-9
    if out.any():
        more = torch.cat([kept, (values[out] ** 2).min()[None]])
        assert more.mean() > tau - 1e-9  # one more would be too much


def test_m2po_counts_only_what_is_in_the_loss():
    log_r = torch.tensor([3.0, 0.1, 0.1], dtype=torch.float64)
    loss = torch.tensor([False, True, True])
    out = rejected(log_r, torch.zeros(3), loss, torch.zeros(3, dtype=torch.int64), 1, M2PO(tau=0.02))
    assert out.tolist() == [False, False, False]


def test_opsm_drops_sequences_that_went_wrong_and_are_far_away():
    log_r = torch.tensor([-1.0, -1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1, 2])
    out = rejected(log_r, advantages, torch.ones(5, dtype=torch.bool), sequence, 3, OPSM(delta=0.5))
    assert out.tolist() == [True, True, False, False, False]


def test_a_sequence_is_rejected_whole():
    log_r = torch.tensor([0.0, 3.0, 0.0], dtype=torch.float64)
    loss, sequence = torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    out = rejected(log_r, torch.zeros(3), loss, sequence, 2, Reject(by="seq_max_k2", max=1.0))
    assert out.tolist() == [True, True, False]
    out = rejected(log_r, torch.zeros(3), loss, sequence, 2, Reject(by="token_k2", max=1.0))
    assert out.tolist() == [False, True, False]


def test_the_loglinear_policy_lies_between_by_version():
    beh, lp = torch.tensor([-1.0, -1.0, -1.0]).double(), torch.tensor([-2.0, -2.0, -2.0]).double()
    old = loglinear_old(beh, lp.requires_grad_(), torch.tensor([5, 4, 1]), 5)
    assert old.tolist() == pytest.approx([-1.0, -1.5, -1.8])  # lag 0: nothing of the way, 1: half, 4: four fifths
    assert not old.requires_grad


@given(st.floats(-1e4, 0), st.floats(-1e4, 0), st.sampled_from(["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]))
def test_a_kl_of_finite_numbers_is_finite(lp, reference, kind):
    leaf = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    made = penalty(leaf, torch.tensor([reference], dtype=torch.float64), kind)
    made.sum().backward()
    assert torch.isfinite(made).all() and torch.isfinite(leaf.grad).all()


def test_a_straight_through_kl_has_its_value_and_the_gradient_of_k2():
    for kind in ("k1", "abs", "k3"):
        lp = torch.tensor([-1.3, -0.2], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([-1.0, -0.5], dtype=torch.float64)
        made = penalty(lp, reference, kind + "+")
        torch.testing.assert_close(made.detach(), penalty(lp.detach(), reference, kind))
        made.sum().backward()
        torch.testing.assert_close(lp.grad, (lp - reference).detach())


def test_the_adaptive_coefficient_moves_towards_its_target_and_no_faster_than_a_fifth():
    table = KL(coefficient=0.1, target=0.5, horizon=1000)
    assert adapted(0.1, 0.5, 100, table) == 0.1
    assert adapted(0.1, 50.0, 100, table) == pytest.approx(0.1 * 1.02)
    assert adapted(0.1, 0.0, 100, table) == pytest.approx(0.1 * 0.98)
    assert adapted(0.1, 50.0, 100, KL(coefficient=0.1)) == 0.1
