"""Group-relative advantages against the values that people reported, and against a naive reference."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.advantages import Members, grpo, over_tokens, zero_variance


def advantages(rewards, *, group_size=None, normalize_by_std=True):
    """Of one group; None has no vote."""
    return grpo(
        torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64),
        torch.tensor([r is not None for r in rewards]),
        torch.zeros(len(rewards), dtype=torch.int64),
        group_size=group_size or len(rewards),
        normalize_by_std=normalize_by_std,
    ).tolist()


def test_one_task_with_rewards_1010_gives_plus_minus_0866():
    """Field report 21: the group is the task, and the deviation is the unbiased one."""
    assert advantages([1, 0, 1, 0]) == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


def test_equal_peers_do_not_blow_up_the_odd_one_out():
    """Field report 22, for the group's own mean and deviation."""
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    noisy = [0.0] + [0.95 + k * 1e-16 for k in range(7)]
    assert max(map(abs, advantages(noisy))) < 3


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2, -1e6, 1e-9])
def test_rewards_that_are_equal_up_to_float_noise_give_exactly_zero(reward):
    """Field report 22: no difference is no advantage, however small the deviation."""
    rewards = [reward, reward * (1 + 2e-16), reward * (1 - 2e-16), reward]
    assert advantages(rewards) == [0.0] * 4
    assert advantages(rewards, normalize_by_std=False) == [0.0] * 4


def test_small_but_real_differences_count():
    assert advantages([0.0, 1e-9], normalize_by_std=False) == pytest.approx([-5e-10, 5e-10])


def test_a_failed_member_neither_votes_nor_gets_a_gradient():
    """Field report 23: [1, 1, 0, 0] with the second failed."""
    assert advantages([1, None, 0, 0], normalize_by_std=False) == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert advantages([1, None, 0, 0]) == pytest.approx([1.155, 0, -0.577, -0.577], abs=1e-3)


def test_an_abstaining_member_leaves_the_group_finite():
    """Field report 24: [1, None, 0]."""
    values = advantages([1, None, 0])
    assert values[1] == 0.0
    assert values == pytest.approx([0.707, 0, -0.707], abs=1e-3)


def test_infrastructure_failures_do_not_drag_the_baseline():
    """Field report 46: [1, 3, 2, failed] is [-1, 1, 0], the failed one left out everywhere."""
    assert advantages([1, 3, 2, None]) == pytest.approx([-1, 1, 0, 0], abs=1e-5)


def test_a_group_configured_as_one_keeps_its_reward():
    assert advantages([0.7], group_size=1) == pytest.approx([0.7], abs=1e-5)
    assert advantages([0.7], group_size=1, normalize_by_std=False) == [0.7]


@pytest.mark.parametrize("rewards", [[5.0], [5.0, None, None], [None, None]])
def test_a_larger_group_with_at_most_one_voter_gets_nothing(rewards):
    assert advantages(rewards, group_size=4) == [0.0] * len(rewards)


def test_groups_are_apart():
    values = grpo(
        torch.tensor([1.0, 0.0, 10.0, 20.0, 5.0], dtype=torch.float64),
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1, 2]),
        group_size=2,
    )
    assert values.tolist() == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071, 0.0], abs=1e-4)


def test_zero_variance_names_the_groups_without_a_signal():
    members = Members(
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        votes=torch.tensor([True, True, True, True, False, False]),
        groups=torch.tensor([0, 0, 1, 1, 2, 2]),
        lengths=torch.ones(6, dtype=torch.int64),
        group_size=2,
    )
    assert zero_variance(members).tolist() == [True, False, False]  # nobody voted in the last one


def test_each_action_token_gets_its_members_advantage():
    assert over_tokens(torch.tensor([1.0, -2.0]), torch.tensor([2, 3])).tolist() == [1, 1, -2, -2, -2]


def naive(rewards, eps=1e-6):
    voting = [r for r in rewards if r is not None]
    if len(voting) < 2:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(voting), statistics.stdev(voting)
    return [0.0 if r is None else (r - mean) / (std + eps) for r in rewards]


@given(st.lists(st.one_of(st.none(), st.integers(-8, 8).map(float)), min_size=2, max_size=12))
def test_agrees_with_a_naive_reference(rewards):
    assert advantages(rewards) == pytest.approx(naive(rewards), abs=1e-9)
