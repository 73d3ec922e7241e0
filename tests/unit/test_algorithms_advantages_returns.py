"""Estimators whose advantages differ from token to token, by hand and against naive references."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from async_rl.algorithms.returns import discounted
from async_rl.config.algorithms import (
    GAE,
    PRIME,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReMax,
    TIROptimalTokenBaseline,
)
from tests.unit.advantage_material import double, estimate, members_of, steps


def white(values):
    """Of a list, by the textbook."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]


def test_sums_are_discounted_within_a_member_alone():
    assert discounted(double([1, 2, 4, 8, 16]), torch.tensor([3, 2]), 0.5).tolist() == [3, 4, 4, 16, 16]


def test_gae_by_hand():
    """One member, two tokens, reward 1 at the last, values .5 and .25: delta = -.25 + ..., both by hand."""
    members = members_of([1.0], lengths=[2], values=double([0.5, 0.25]))
    made = estimate(members, GAE(gamma=0.5, lam=0.5))
    last = 1 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * last
    assert made.returns.tolist() == pytest.approx([first + 0.5, last + 0.25])
    assert made.advantages.tolist() == pytest.approx(white([first, last]))


def test_without_discount_the_returns_of_gae_are_the_reward_to_go():
    members = members_of([1.0, -2.0], lengths=[3, 2], values=double([3, 1, 4, 1, 5]))
    members = replace(members, token_rewards=double([0.5, 0, 0, 0, 0]))
    assert estimate(members, GAE()).returns.tolist() == pytest.approx([1.5, 1, 1, -2, -2])


def test_a_member_without_a_vote_teaches_the_critic_nothing_and_shifts_no_other():
    values = double([0.3, -0.2, 0.1, 9, 9])
    both = estimate(members_of([1.0, None], lengths=[3, 2], values=values), GAE(gamma=0.9, lam=0.8))
    first = estimate(members_of([1.0], lengths=[3], values=values[:3]), GAE(gamma=0.9, lam=0.8))
    assert both.advantages.tolist() == [*first.advantages.tolist(), 0, 0]
    assert both.returns.tolist() == [*first.returns.tolist(), 9, 9]


def test_tokens_out_of_the_loss_carry_returns_but_are_not_whitened_over():
    loss = torch.tensor([True, False, True, True])
    members = members_of([1.0, 0.0], lengths=[2, 2], loss=loss, token_rewards=double([0, 2, 0, 0.5]))
    values = estimate(members, ReinforcePlusPlus()).advantages
    assert values[loss].tolist() == pytest.approx(white([3.0, 0.5, 0.5]))


def test_one_token_in_the_loss_has_nothing_to_be_whitened_with():
    members = members_of([1.0, 2.0], lengths=[1, 1], loss=torch.tensor([True, False]))
    assert estimate(members, ReinforcePlusPlus()).advantages.tolist() == [0, 0]


def test_equal_returns_are_whitened_to_exactly_zero():
    members = members_of([0.1 + 0.2, 0.3], lengths=[2, 2])
    assert estimate(members, ReinforcePlusPlus()).advantages.tolist() == [0, 0, 0, 0]


def test_the_greedy_answer_is_the_baseline_of_remax():
    members = members_of([1.0, 0.0, 5.0], groups=[0, 0, 1], lengths=[2, 1, 1], greedy=double([0.25, 4]))
    members = replace(members, token_rewards=double([-0.5, 0, 0, 0]))
    assert estimate(members, ReMax()).advantages.tolist() == [0.25, 0.75, -0.25, 1.0]


def test_a_group_whose_greedy_answer_failed_gets_nothing():
    members = members_of([1.0, 0.0, 5.0], groups=[0, 0, 1], greedy=double([float("nan"), 4]))
    assert estimate(members, ReMax()).advantages.tolist() == [0, 0, 1]


def two_of_one_group(**given):
    """Returns 1 and 0; the first acts at 0, 1, 2, the second at 0 and, after tool output, at 3."""
    members = members_of([1.0, 0.0], lengths=[3, 2], positions=torch.tensor([0, 1, 2, 0, 3]))
    half = torch.full((5,), 0.5, dtype=torch.float64)
    return replace(members, old=half.log(), sum_pi_squared=double([0.5, 0.5, 0.5, 1.0, 0.5]), **given)


def test_a_position_at_which_one_member_acts_alone_is_its_own_baseline_and_the_tail_has_none():
    """W is .5 of the first and 1 of the second at position 0; at 1 and 2 only the first acts; 3 is the tail."""
    made = estimate(two_of_one_group(), OptimalTokenBaseline()).advantages
    assert made.tolist() == pytest.approx([1 - 0.5 / 1.5, 0, 0, -0.5 / 1.5, 0], abs=1e-7)


def test_compacted_positions_leave_tool_output_out():
    """At the second token W is 1 and 1.5; the third is the longest member's alone: baseline 0."""
    made = estimate(two_of_one_group(), TIROptimalTokenBaseline()).advantages
    assert made.tolist() == pytest.approx([1 - 0.5 / 1.5, 1 - 1 / 2.5, 1, -0.5 / 1.5, -1 / 2.5], abs=1e-7)


def test_weights_of_the_correction_enter_squared():
    made = estimate(two_of_one_group(weights=double([2, 0, 0, 1, 0])), TIROptimalTokenBaseline()).advantages
    assert made.tolist() == pytest.approx([1 - 2 / 3, 1 - 2 / 3, 1, -2 / 3, -2 / 3], abs=1e-7)


def test_a_sure_policy_has_no_negative_weight():
    """pi = 1 up to rounding: 1 - 2 pi + pi^2 can be below 0, and the sum of such weights about -1e-8."""
    members = replace(two_of_one_group(), old=double([0.0] * 5), sum_pi_squared=double([1 - 1e-8] * 5))
    assert estimate(members, TIROptimalTokenBaseline()).advantages.tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("settings", [OptimalTokenBaseline(), TIROptimalTokenBaseline()], ids=repr)
def test_a_group_configured_as_one_has_no_token_baseline_and_one_left_alone_no_advantage(settings):
    given = {"lengths": [2], "old": double([-1, -1]), "sum_pi_squared": double([0.3, 0.3])}
    assert estimate(members_of([3.0], group_size=1, **given), settings).advantages.tolist() == [3, 3]
    assert estimate(members_of([3.0], group_size=4, **given), settings).advantages.tolist() == [0, 0]


def naive_prime(members, settings):
    """The paper's rule in plain loops: leave-one-out of each source, summed from the end, whitened."""
    parts = [p.tolist() for p in torch.split(settings.beta * members.implicit, members.lengths.tolist())]
    extra = [p.tolist() for p in torch.split(members.token_rewards, members.lengths.tolist())]
    returns, inside = [], []
    for k, own in enumerate(parts):
        others = [j for j in range(len(parts)) if members.groups[j] == members.groups[k] and members.votes[j]]
        n = len(others)
        if not members.votes[k] or n < 2:
            returns += [None] * len(own)
            inside += [False] * len(own)
            continue
        mean = sum(sum(parts[j]) / len(parts[j]) for j in others)
        total = {j: float(members.rewards[j]) + sum(extra[j]) for j in others}
        rewards = [settings.implicit * (r * n / (n - 1) - mean / (n - 1)) for r in own]
        rewards[-1] += settings.outcome * (total[k] * n / (n - 1) - sum(total.values()) / (n - 1))
        returns += [sum(rewards[t:]) for t in range(len(rewards))]
        inside += members.loss[members.sequence == k].tolist()
    counted = [r for r, use in zip(returns, inside, strict=True) if use]
    if len(counted) < 2:
        return [0.0] * len(returns)
    mean = math.fsum(counted) / len(counted)
    variance = math.fsum((x - mean) ** 2 for x in counted) / (len(counted) - 1)
    if max(abs(x - mean) for x in counted) <= 1e-6 * max(map(abs, counted)):
        return [0.0] * len(returns)
    return [0.0 if r is None else (r - mean) / math.sqrt(variance + 1e-8) for r in returns]


def test_prime_gives_credit_where_the_reward_model_sees_it():
    members = members_of([1.0, 0.0], lengths=[2, 2], implicit=double([4, 0, 0, 0]))
    made = estimate(members, PRIME(implicit=1.0, outcome=0.0, beta=0.5)).advantages
    # implicit 2, 0 and 0, 0; means 1 and 0; leave-one-out: 2 r - 1 each; from the end: 2, -1, -2, -1
    assert made.tolist() == pytest.approx(white([2, -1, -2, -1]))


@given(steps())
def test_prime_agrees_with_a_naive_reference(members):
    settings = PRIME(implicit=2.0, outcome=3.0, beta=0.1)
    if members.group_size == 1:
        members = replace(members, group_size=4)
    made = estimate(members, settings).advantages.tolist()
    assert made == pytest.approx(naive_prime(members, settings), rel=1e-4, abs=1e-4)
