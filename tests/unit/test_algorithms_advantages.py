"""Estimators that compare a group's rewards, against the values that people reported and a naive reference."""

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.advantages import zero_variance
from async_rl.config.algorithms import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    GRPOPassK,
    MaxRL,
    ReinforcePlusPlusBaseline,
)
from async_rl.errors import UserError
from tests.unit.advantage_material import double, estimate, members_of, of_members

DR_GRPO = GRPO(normalize_by_std=False)
COMPARING = [GRPO(), DR_GRPO, RLOO(), RLOO(normalize_by_std=True), OPO(), GPG(), MaxRL(), GRPOPassK()]


def advantages(rewards, settings, **given):
    return of_members(members_of(rewards, **given), settings)


def test_one_task_with_rewards_1010_gives_plus_minus_0866():
    """Field report 21: the group is the task, and the deviation is the unbiased one."""
    assert advantages([1, 0, 1, 0], GRPO()) == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


def test_equal_peers_do_not_blow_up_the_odd_one_out():
    """Field report 22: by the deviation of the others, where they have one."""
    by_others = RLOO(normalize_by_std=True)
    assert advantages([1, 0, 0, 0], by_others) == pytest.approx([1.0, -0.577, -0.577, -0.577], abs=1e-3)
    assert advantages([0] + [0.95] * 7, by_others) == pytest.approx([-0.95] + [0.378] * 7, abs=1e-3)
    noisy = [0.0] + [0.95 + k * 1e-16 for k in range(7)]
    assert advantages(noisy, by_others) == pytest.approx([-0.95] + [0.378] * 7, abs=1e-3)


def test_equal_peers_do_not_blow_up_the_groups_own_deviation():
    """Field report 22, for the group's own mean and deviation."""
    assert advantages([1, 0, 0, 0], GRPO()) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("settings", COMPARING, ids=repr)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2, -1e6, 1e-9])
def test_rewards_that_are_equal_up_to_float_noise_give_exactly_zero(reward, settings):
    """Field report 22: no difference is no advantage, however small the deviation."""
    rewards = [reward, reward * (1 + 2e-16), reward * (1 - 2e-16), reward]
    assert advantages(rewards, settings, lengths=[1, 2, 3, 4]) == [0.0] * 4


def test_small_but_real_differences_count():
    assert advantages([0.0, 1e-9], DR_GRPO) == pytest.approx([-5e-10, 5e-10])


def test_a_failed_member_neither_votes_nor_gets_a_gradient():
    """Field report 23: [1, 1, 0, 0] with the second failed."""
    assert advantages([1, None, 0, 0], DR_GRPO) == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert advantages([1, None, 0, 0], GRPO()) == pytest.approx([1.155, 0, -0.577, -0.577], abs=1e-3)
    assert advantages([1, None, 0, 0], RLOO()) == pytest.approx([1, 0, -0.5, -0.5])


def test_a_failed_member_is_zero_even_if_its_tokens_are_in_the_loss_and_were_rewarded():
    members = members_of([1, None, 0, 0], lengths=[2] * 4, loss=torch.ones(8, dtype=torch.bool))
    members = replace(members, rewards=double([1, 1, 0, 0]), token_rewards=double([0, 0, 0.5, 0.5, 0, 0, 0, 0]))
    assert of_members(members, DR_GRPO) == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    whitened = of_members(members, ReinforcePlusPlusBaseline())
    assert whitened[1] == 0.0
    assert sum(whitened) == pytest.approx(0)


def test_an_abstaining_member_leaves_the_group_finite():
    """Field report 24: [1, None, 0]."""
    values = advantages([1, None, 0], GRPO())
    assert values[1] == 0.0
    assert values == pytest.approx([0.707, 0, -0.707], abs=1e-3)


def test_infrastructure_failures_do_not_drag_the_baseline():
    """Field report 46: [1, 3, 2, failed] is [-1, 1, 0], the failed one left out everywhere."""
    assert advantages([1, 3, 2, None], GRPO()) == pytest.approx([-1, 1, 0, 0], abs=1e-5)


def test_a_member_whose_tokens_are_all_masked_votes_and_is_in_no_whitening():
    """Field report 20, for advantages: the truncated one counts in the group's mean, its tokens in no other."""
    loss = torch.tensor([True] * 8 + [False] * 4)
    members = members_of([1, 0, 0], lengths=[4, 4, 4], loss=loss)
    assert of_members(members, DR_GRPO) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    values = estimate(members, ReinforcePlusPlusBaseline()).advantages
    assert float(values[loss].mean()) == pytest.approx(0)
    assert float(values[loss].std()) == pytest.approx(1)
    nothing = replace(members, loss=torch.zeros(12, dtype=torch.bool))
    assert estimate(nothing, ReinforcePlusPlusBaseline()).advantages.tolist() == [0.0] * 12


def test_a_group_configured_as_one_keeps_its_reward():
    assert advantages([0.7], GRPO(), group_size=1) == pytest.approx([0.7], abs=1e-5)
    assert advantages([0.7], DR_GRPO, group_size=1) == [0.7]
    assert advantages([0.7], OPO(), group_size=1) == [0.7]
    assert advantages([0.7], RLOO(), group_size=1) == [0.0]  # the others, of which there are none


@pytest.mark.parametrize("settings", COMPARING, ids=repr)
@pytest.mark.parametrize("rewards", [[5.0], [5.0, None, None], [None, None]])
def test_a_larger_group_with_at_most_one_voter_gets_nothing(rewards, settings):
    assert advantages(rewards, settings, group_size=4) == [0.0] * len(rewards)


def test_a_member_left_alone_is_in_no_whitening():
    together = members_of([1, 0, 1, 0, 1, 7], groups=[0, 0, 1, 1, 1, 2], group_size=3)
    values = of_members(together, ReinforcePlusPlusBaseline())
    apart = of_members(members_of([1, 0, 1, 0, 1], groups=[0, 0, 1, 1, 1]), ReinforcePlusPlusBaseline())
    assert values == [*apart, 0.0]


def test_groups_are_apart():
    values = advantages([1.0, 0.0, 10.0, 20.0, 5.0], GRPO(), groups=[0, 0, 1, 1, 2], group_size=2)
    assert values == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071, 0.0], abs=1e-4)


def test_what_was_added_at_tokens_is_a_part_of_the_outcome():
    members = members_of([1, 0], lengths=[2, 3], token_rewards=double([-0.25, -0.25, 0, 0, 0.5]))
    assert of_members(members, DR_GRPO) == [0.0, 0.0]
    assert of_members(replace(members, rewards=double([2, 0])), DR_GRPO) == [0.5, -0.5]


def test_the_best_member_alone_gets_its_lead():
    assert advantages([0.2, 1.0, 0.6], GRPOPassK(normalize_by_std=False)) == pytest.approx([0, 0.4, 0])
    assert advantages([0.2, 1.0, 0.6], GRPOPassK()) == pytest.approx([0, 1, 0], abs=1e-5)
    assert advantages([1.0, 1.0, 0.0], GRPOPassK()) == [0, 0, 0]


def test_the_length_weighted_mean_is_the_baseline_of_opo():
    assert advantages([1, 0], OPO(), lengths=[3, 1]) == pytest.approx([0.25, -0.75])


def test_how_long_a_failed_member_was_matters_to_none():
    assert advantages([1, 0, None], OPO(), lengths=[3, 1, 50]) == pytest.approx([0.25, -0.75, 0])


@pytest.mark.parametrize("settings", COMPARING, ids=repr)
def test_rewards_at_the_border_of_equal_do_not_blow_up(settings):
    """The two differ by more than float noise, each from their mean by less."""
    assert max(map(abs, advantages([1000.0012, 1000.0], settings))) < 1


def test_gpg_scales_by_the_share_of_rewards_that_are_not_zero():
    values = advantages([1, 0, 0, 0, None], GPG(f_norm=2.0), groups=[0, 0, 1, 1, 1], group_size=3)
    assert values == pytest.approx([1, -1, 0, 0, 0])  # alpha = 4 voters / 1


def test_maxrl_divides_by_the_rate_of_success():
    assert advantages([1, 0, 0, 0], MaxRL()) == pytest.approx([3, -1, -1, -1])
    assert advantages([0, 0, 0, 0], MaxRL()) == [0, 0, 0, 0]


@pytest.mark.parametrize("rewards", [[-1.0, 0.0], [-1.0, 1.0], [0.1, 0.2, -0.3]])
def test_maxrl_without_a_positive_rate_of_success_gives_nothing_instead_of_turning_the_sign(rewards):
    assert advantages(rewards, MaxRL()) == [0.0] * len(rewards)


def test_no_component_drowns_another():
    components = {"large": double([1000, 0, 1000, 0]), "small": double([0, 0, 0.001, 0.001])}
    both = advantages([0] * 4, GDPO(weights={"large": 1.0, "small": 1.0}), components=components)
    assert both == pytest.approx([0, -1.22, 1.22, 0], abs=0.01)


def test_a_component_that_no_grader_gives_is_named():
    members = members_of([0, 1], components={"accuracy": double([0, 1])})
    with pytest.raises(UserError, match=r"weights\.acuracy: the grader gives no such component \(did you mean 'acc"):
        estimate(members, GDPO(weights={"acuracy": 1.0}))


def test_zero_variance_names_the_groups_without_a_signal():
    members = members_of([1.0, 1.0, 0.0, 1.0, None, None], groups=[0, 0, 1, 1, 2, 2], group_size=2)
    assert zero_variance(members).tolist() == [True, False, False]  # nobody voted in the last one


def test_each_action_token_gets_its_members_advantage():
    members = members_of([1, 0], lengths=[2, 3])
    assert estimate(members, DR_GRPO).advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


def naive(rewards, eps=1e-6):
    voting = [r for r in rewards if r is not None]
    if len(voting) < 2:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(voting), statistics.stdev(voting)
    return [0.0 if r is None else (r - mean) / (std + eps) for r in rewards]


def naive_leave_one_out(rewards, eps=1e-6):
    values = []
    for k, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if r is not None and j != k]
        if own is None or not others:
            values.append(0.0)
            continue
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        values.append((own - statistics.fmean(others)) / (std + eps if std else 1.0))
    return values


REWARDS = st.lists(st.one_of(st.none(), st.integers(-8, 8).map(float)), min_size=2, max_size=12)


@given(REWARDS)
def test_agrees_with_a_naive_reference(rewards):
    assert advantages(rewards, GRPO()) == pytest.approx(naive(rewards), abs=1e-9)


@given(REWARDS)
def test_leaving_one_out_agrees_with_a_naive_reference(rewards):
    assert advantages(rewards, RLOO(normalize_by_std=True)) == pytest.approx(naive_leave_one_out(rewards), abs=1e-6)
