"""What holds for every estimator and any step."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from async_rl.algorithms.registry import ESTIMATORS
from async_rl.config.algorithms import Advantage, CustomAdvantage
from tests.unit.advantage_material import SETTINGS, double, estimate, members_of, steps

FEW = hypothesis_settings(max_examples=40, deadline=None)
EVERY = pytest.mark.parametrize("settings", SETTINGS, ids=repr)
ANY_FINITE = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([1.7e308, -1.7e308]))
PER_TOKEN = ("loss", "positions", "token_rewards", "values", "old", "sum_pi_squared", "weights", "implicit")


def test_every_table_of_the_configuration_has_its_estimator_and_is_tested_here():
    tables = {table.__struct_config__.tag for table in Advantage.__args__ if table is not CustomAdvantage}
    assert tables == set(ESTIMATORS) == {settings.kind for settings in SETTINGS}


def permuted(members, order):
    """The members in another order, each with its tokens."""
    parts = torch.split(torch.arange(int(members.lengths.sum())), members.lengths.tolist())
    tokens = torch.cat([parts[k] for k in order])
    moved = {name: getattr(members, name) for name in PER_TOKEN}
    moved = {name: None if values is None else values[tokens] for name, values in moved.items()}
    for name in ("rewards", "votes", "groups", "lengths"):
        moved[name] = getattr(members, name)[order]
    components = {name: values[order] for name, values in members.components.items()}
    return replace(members, components=components, **moved), tokens


@EVERY
@FEW
@given(steps(), st.randoms(use_true_random=False))
def test_another_order_of_the_members_is_the_same_in_another_order(settings, members, random):
    order = list(range(len(members.lengths)))
    random.shuffle(order)
    again, tokens = permuted(members, torch.tensor(order))
    here, there = estimate(members, settings).advantages[tokens], estimate(again, settings).advantages
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)


@EVERY
@FEW
@given(steps(numbers=ANY_FINITE))
def test_no_finite_input_gives_anything_that_is_not_finite(settings, members):
    made = estimate(members, settings)
    assert made.advantages.shape == (int(members.lengths.sum()),)
    assert made.advantages.dtype == torch.float64
    assert bool(torch.isfinite(made.advantages).all())
    assert made.returns is None or bool(torch.isfinite(made.returns).all())
    if settings.kind not in ("gpg", "maxrl"):  # these may multiply by as much as a step has members
        assert bool(torch.isfinite(made.advantages.float()).all())


@EVERY
@pytest.mark.parametrize("signs", [[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [1, 1, -1, -1]], ids=repr)
def test_numbers_at_the_end_of_what_a_float_holds_give_nothing_that_is_not_finite(settings, signs):
    far = 1.7e308 * double(signs)
    columns = dict.fromkeys(("token_rewards", "values", "old", "sum_pi_squared", "weights", "implicit"), far)
    components = {"accuracy": far[:2], "format": far[2:]}
    members = members_of([0.0, 1.0], lengths=[2, 2], components=components, greedy=far[1:2], **columns)
    for rewards in ([0.0, 1.0], far[1:3]):
        made = estimate(replace(members, rewards=double(rewards)), settings)
        assert bool(torch.isfinite(made.advantages).all())
        assert made.returns is None or bool(torch.isfinite(made.returns).all())


@EVERY
@FEW
@given(steps())
def test_a_member_without_a_vote_gets_nothing_and_changes_nothing(settings, members):
    mute = ~members.votes
    other = replace(
        members,
        rewards=torch.where(mute, 1e3, members.rewards),
        token_rewards=torch.where(members.over_tokens(mute), -7.0, members.token_rewards),
        values=torch.where(members.over_tokens(mute), 1e3, members.values),
        implicit=torch.where(members.over_tokens(mute), 1e3, members.implicit),
        old=torch.where(members.over_tokens(mute), -9.0, members.old),
        sum_pi_squared=torch.where(members.over_tokens(mute), 0.5, members.sum_pi_squared),
        components={name: torch.where(mute, 1e3, values) for name, values in members.components.items()},
    )
    here, there = estimate(members, settings).advantages, estimate(other, settings).advantages
    assert bool((here[members.over_tokens(mute)] == 0).all())
    assert torch.equal(here, there)


@EVERY
@FEW
@given(steps(), st.floats(0.125, 8))
def test_equal_peers_up_to_float_noise_are_equal_peers(settings, members, reward):
    """Every voter has the same outcome, or the same but for rounding: no advantage is large."""
    random = np.random.default_rng(0)
    noise = torch.from_numpy(1 + random.integers(-3, 4, len(members.lengths)) * 2.2e-16)

    def flat(factor):
        return replace(
            members,
            rewards=torch.where(members.votes, reward * factor, 0.0),
            token_rewards=torch.zeros_like(members.token_rewards),
            components={name: reward * factor * torch.ones(len(noise)).double() for name in members.components},
        )

    exact, noisy = (estimate(flat(f), settings).advantages for f in (torch.ones_like(noise), noise))
    torch.testing.assert_close(noisy, exact, rtol=1e-6, atol=1e-6)


@EVERY
@FEW
@given(steps())
def test_a_step_is_not_changed_by_its_estimator(settings, members):
    names = [name for name in ("rewards", "greedy", *PER_TOKEN) if getattr(members, name) is not None]
    before = {name: getattr(members, name).clone() for name in names}
    estimate(members, settings)
    assert all(torch.equal(getattr(members, name).nan_to_num(), old.nan_to_num()) for name, old in before.items())


def test_a_setting_that_an_estimator_does_not_use_is_refused():
    with pytest.raises(msgspec.ValidationError, match="gamma"):
        msgspec.convert({"kind": "grpo", "gamma": 0.9}, Advantage)
