"""The clipped loss against a loop that is written like its formula, and against finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.losses import ppo
from async_rl.algorithms.registry import LOSSES

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def naive(lp, old, advantage):
    rho = math.exp(max(-20.0, min(20.0, lp - old)))
    clipped = max(1 - CLIP["clip_low"], min(1 + CLIP["clip_high"], rho))
    loss = max(-advantage * rho, -advantage * clipped)
    return min(loss, -CLIP["dual_clip"] * advantage) if advantage < 0 else loss


log_p = st.floats(-30, 0)


@given(st.lists(st.tuples(log_p, log_p, st.floats(-3, 3)), min_size=1, max_size=20))
def test_agrees_with_the_formula(tokens):
    lp, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    expected = [naive(*token) for token in tokens]
    assert ppo(lp, old, advantage, **CLIP).values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    old = -torch.rand(40, dtype=torch.float64) * 3
    lp = (old + torch.randn(40, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(40, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ppo(x, old, advantage, **CLIP).values, (lp,), eps=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.3, 1.0, True),  # over 1 + clip_high with a gain: no further
        (0.7, 1.0, False),  # moving back is allowed
        (0.7, -1.0, True),
        (1.3, -1.0, False),
        (3.5, -1.0, True),  # dual clip
        (9.0, 0.0, False),
    ],
)
def test_clipped_tokens_are_those_without_gradient(ratio, advantage, clipped):
    lp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = ppo(lp, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]).double(), **CLIP)
    loss.values.sum().backward()
    assert loss.clipped.tolist() == [clipped]
    assert (lp.grad.item() == 0) == (clipped or advantage == 0)


def test_ratios_far_apart_stay_finite():
    lp = torch.tensor([-1000.0, 0.0], requires_grad=True)
    loss = ppo(lp, torch.tensor([0.0, -1000.0]), torch.tensor([1.0, -1.0]), **CLIP).values
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(lp.grad).all()


def test_the_ratio_is_taken_against_what_is_stored():
    """Field report 16: with old = lp the ratio is 1 whatever happened, and nothing is ever clipped."""
    stored = torch.log(torch.tensor([0.2, 0.5]))
    now = torch.log(torch.tensor([0.4, 0.5]))
    loss = ppo(now, stored, torch.ones(2), **CLIP)
    assert (-loss.values).tolist() == pytest.approx([1.28, 1.0])
    assert loss.clipped.tolist() == [True, False]


def test_proportional_losses_have_no_gradient_at_advantage_zero():
    from async_rl.algorithms.losses import Tokens
    from async_rl.config.schema import GRPO

    for loss in LOSSES.values():
        lp = torch.randn(8, dtype=torch.float64, requires_grad=True)
        tokens = Tokens(
            logprobs=lp,
            old=torch.randn(8, dtype=torch.float64),
            advantages=torch.zeros(8, dtype=torch.float64),
            loss=torch.ones(8, dtype=torch.bool),
            sequence=torch.tensor([0] * 5 + [1] * 3),
            sequences=2,
        )
        loss.evaluate(tokens, GRPO()).values.sum().backward()
        assert not loss.proportional or not lp.grad.any()
