"""The losses of the critic and of the implicit reward model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.value import outcome_loss, value_loss
from tests.unit.advantage_material import double


def of_value(value, old, target, clip=0.5):
    values = double([value]).requires_grad_()
    made = value_loss(values, double([old]), double([target]), clip)
    made.values.sum().backward()
    return float(made.values[0].detach()), bool(made.clipped[0]), float(values.grad[0])


def test_within_the_clip_it_is_half_the_squared_error():
    assert of_value(1.2, 1.0, 2.0) == pytest.approx((0.32, False, -0.8))


def test_a_value_that_has_gone_far_enough_towards_the_return_pulls_no_more():
    assert of_value(1.8, 1.0, 2.0) == pytest.approx((0.125, True, 0.0))


def test_a_value_that_has_gone_far_the_wrong_way_is_pulled_back():
    assert of_value(0.0, 1.0, 2.0) == pytest.approx((2.0, False, -2.0))


@given(st.floats(-8, 8), st.floats(-8, 8), st.floats(-8, 8), st.floats(0.01, 4))
def test_the_clip_never_makes_the_loss_smaller(value, old, target, clip):
    loss, _, _ = of_value(value, old, target, clip)
    assert loss >= 0.5 * (value - target) ** 2


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences():
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 64, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old, returns, 0.5).values, values.clone().requires_grad_(), eps=1e-7
    )


def test_the_reward_model_learns_by_cross_entropy_to_the_outcome():
    made = outcome_loss(double([4.0, 4.0, 0.0]), double([1, 0, 0.25]), beta=0.5)
    right = 1 / (1 + math.exp(-2))
    assert made.tolist() == pytest.approx([-math.log(right), -math.log(1 - right), math.log(2)])


def test_rewards_beyond_an_outcome_are_taken_for_one():
    assert outcome_loss(double([1.0, 1.0]), double([7, -3]), 1.0).tolist() == pytest.approx(
        outcome_loss(double([1.0, 1.0]), double([1, 0]), 1.0).tolist()
    )


@given(st.floats(-1e300, 1e300), st.floats(0, 1))
def test_no_sum_is_too_large_for_the_cross_entropy(total, outcome):
    sums = double([total]).requires_grad_()
    loss = outcome_loss(sums, double([outcome]), 0.05)
    loss.sum().backward()
    assert math.isfinite(loss.item()) and math.isfinite(sums.grad.item())
