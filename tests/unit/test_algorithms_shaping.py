"""The soft overlong penalty, and which members are drawn anew."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.shaping import overlong_penalty, resample_weights, resampled
from async_rl.config.algorithms import Overlong, Resample
from tests.unit.advantage_material import double, members_of


def test_the_penalty_begins_a_buffer_before_the_longest_answer_and_ends_at_minus_one():
    lengths = torch.tensor([1, 8, 9, 10, 11, 12, 100])
    penalty = overlong_penalty(lengths, Overlong(buffer=4), limit=12)
    assert penalty.tolist() == [0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_the_settings_own_longest_answer_counts_before_the_samplers():
    penalty = overlong_penalty(torch.tensor([6, 8, 12]), Overlong(buffer=4, max=8, factor=2.0), limit=12)
    assert penalty.tolist() == [-1, -2, -2]


def test_a_buffer_as_long_as_the_longest_answer_penalises_from_the_first_token():
    assert overlong_penalty(torch.tensor([1, 4]), Overlong(buffer=4), limit=4).tolist() == [-0.25, -1]


REWARDS = double([-2.0, 0.0, 1.0, 3.0])


@pytest.mark.parametrize(
    ("method", "weights"), [("pow", [4, 0, 1, 9]), ("max_min", [1, 0, 0, 1]), ("max_random", [0.1, 0.1, 0.1, 0.4])]
)
def test_weights_by_method(method, weights):
    made = resample_weights(REWARDS, Resample(method=method)).tolist()
    assert made == pytest.approx([w + 1e-8 for w in weights], rel=1e-12)


def test_rewards_equal_to_the_best_but_for_rounding_are_the_best():
    made = resample_weights(double([0.1 + 0.2, 0.3, 0.0]), Resample(method="max_random"))
    assert made.tolist() == pytest.approx([0.4, 0.4, 0.1])


def test_members_are_drawn_by_their_weights_and_in_order():
    rewards = [1.0, 2.0, None, 0.0] * 500
    drawn = resampled(members_of(rewards, groups=[k // 4 for k in range(2000)]), Resample(), seed=[7, 3])
    assert len(drawn) == 2000 and drawn.tolist() == sorted(drawn.tolist())
    by_reward = Counter(rewards[k] for k in drawn.tolist())
    assert set(by_reward) == {1.0, 2.0}  # no member without a vote, and hardly one of weight 1e-8
    assert by_reward[2.0] / 2000 == pytest.approx(0.8, abs=0.04)  # 4 to 1


def test_the_draw_is_that_of_its_seed():
    members = members_of([1.0, 2.0, 3.0, 4.0] * 8)
    first = resampled(members, Resample(), seed=[1, 5]).tolist()
    assert first == resampled(members, Resample(), seed=[1, 5]).tolist()
    assert first != resampled(members, Resample(), seed=[1, 6]).tolist()


def test_where_nobody_votes_everybody_stays():
    assert resampled(members_of([None, None, None]), Resample(), seed=[0]).tolist() == [0, 1, 2]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.sampled_from(["pow", "max_min", "max_random"]),
    st.floats(0.1, 100),
)
def test_any_finite_rewards_can_be_drawn_from(rewards, method, power):
    drawn = resampled(members_of(rewards), Resample(method=method, power=power), seed=[0])
    assert len(drawn) == len(rewards)
