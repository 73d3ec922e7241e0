"""Estimators, value loss, resampling weights and overlong penalty against verl 0.9.1's own functions.

tests/golden/make_advantages.py made the data. Where we differ on purpose:

- alone: a member alone in a group meant to be larger gets 0, verl gives it its reward. What is whitened over the step
  differs everywhere then, so such steps are left out there; `rloo` gives 0 also in a group configured as one, as
  verl's `rloo_vectorized` does.
- holes: `optimal_token_baseline` with tool output between action tokens. verl takes the longest member by the number
  of its action tokens, and has no baseline from that number on as if it were a position; ours takes both by position.
- overlong: verl goes on below -1 for answers longer than the longest; ours, like the paper, does not.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.algorithms.members import Members
from async_rl.algorithms.shaping import overlong_penalty, resample_weights
from async_rl.algorithms.value import value_loss
from async_rl.config.algorithms import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    GRPOPassK,
    OptimalTokenBaseline,
    Overlong,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Resample,
    TIROptimalTokenBaseline,
)
from tests.unit.advantage_material import double, estimate

TOLERANCE = 1e-5
LEAST = 20

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "advantages.npz")
CASES = range(36)

PER_GROUP = {
    "grpo": GRPO(),
    "grpo_vectorized": GRPO(),
    "dr_grpo": GRPO(normalize_by_std=False),
    "rloo": RLOO(),
    "rloo_vectorized": RLOO(),
    "opo": OPO(),
    "gpg": GPG(f_norm=2.0),
}
WHITENED_PER_GROUP = {
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline(),
    "gdpo": GDPO(weights={"accuracy": 1.0, "format": 0.25}),
}
OF_ANY_GROUP = {
    "reinforce_plus_plus": ReinforcePlusPlus(gamma=0.97),
    "gae": GAE(gamma=0.97, lam=0.9),
    "remax": ReMax(),
}
LEADING = {"grpo_passk": GRPOPassK(), "grpo_passk/plain": GRPOPassK(normalize_by_std=False)}


@cache
def case(number, weighted=False) -> Members:
    def column(name):
        return torch.from_numpy(GOLDEN[f"{number}/{name}"])

    lengths = column("lengths")
    return Members(
        rewards=column("outcome"),
        votes=torch.ones(len(lengths), dtype=torch.bool),
        groups=column("groups"),
        lengths=lengths,
        group_size=int(column("group_size")),
        loss=torch.ones(int(lengths.sum()), dtype=torch.bool),
        positions=column("positions"),
        token_rewards=column("token_rewards"),
        components={name: column(f"component/{name}") for name in ("accuracy", "format")},
        greedy=column("greedy"),
        values=column("values"),
        old=column("old"),
        sum_pi_squared=column("sum_pi_squared"),
        weights=column("weights") if weighted else None,
    )


def of_verl(number, name) -> torch.Tensor:
    return double(GOLDEN[f"{number}/verl/{name}"])


def alone(members) -> torch.Tensor:
    """[N] the only one of a group meant to be larger."""
    return (torch.bincount(members.groups)[members.groups] == 1) & (members.group_size > 1)


def agree(ours, theirs, where=None):
    where = torch.ones_like(ours, dtype=torch.bool) if where is None else where
    torch.testing.assert_close(ours[where], theirs[where], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", PER_GROUP)
def test_estimators_over_groups_agree_but_for_members_left_alone(name):
    for number in CASES:
        members, settings = case(number), PER_GROUP[name]
        ours, left = estimate(members, settings).advantages, members.over_tokens(alone(members))
        if name == "rloo" and members.group_size == 1:
            left = torch.ones_like(left)
        agree(ours, of_verl(number, name), ~left)
        assert bool((ours[left] == 0).all())


@pytest.mark.parametrize("name", WHITENED_PER_GROUP)
def test_whitened_estimators_over_groups_agree_where_no_member_is_left_alone(name):
    numbers = [number for number in CASES if not alone(case(number)).any()]
    assert len(numbers) >= LEAST
    for number in numbers:
        agree(estimate(case(number), WHITENED_PER_GROUP[name]).advantages, of_verl(number, name))


@pytest.mark.parametrize("name", OF_ANY_GROUP)
def test_estimators_that_ask_for_no_group_agree(name):
    for number in CASES:
        agree(estimate(case(number), OF_ANY_GROUP[name]).advantages, of_verl(number, name))


def test_the_returns_of_gae_agree():
    for number in CASES:
        agree(estimate(case(number), OF_ANY_GROUP["gae"]).returns, of_verl(number, "gae/returns"))


@pytest.mark.parametrize("name", LEADING)
def test_the_best_of_a_group_agrees(name):
    numbers = [number for number in CASES if f"{number}/verl/{name}" in GOLDEN]
    assert len(numbers) >= LEAST
    for number in numbers:
        agree(estimate(case(number), LEADING[name]).advantages, of_verl(number, name))


@pytest.mark.parametrize("form", ["", "/weighted"])
def test_token_baselines_over_compacted_positions_agree_but_for_members_left_alone(form):
    for number in CASES:
        members = case(number, bool(form))
        ours, left = estimate(members, TIROptimalTokenBaseline()).advantages, members.over_tokens(alone(members))
        agree(ours, of_verl(number, f"tir_optimal_token_baseline{form}"), ~left)
        assert bool((ours[left] == 0).all())


@pytest.mark.parametrize("form", ["", "/weighted"])
def test_token_baselines_agree_but_for_members_left_alone_and_the_longest_with_holes(form):
    whole, compared = 0, 0
    for number in CASES:
        members = case(number, bool(form))
        apart = members.over_tokens(alone(members) | (longest(members) & bool(holes(members))))
        agree(
            estimate(members, OptimalTokenBaseline()).advantages,
            of_verl(number, f"optimal_token_baseline{form}"),
            ~apart,
        )
        whole += not holes(members)
        compared += int((~apart).sum() > 10)
    assert whole >= len(CASES) // 2 and compared >= LEAST


def holes(members) -> bool:
    return bool((members.positions[members.lengths.cumsum(0) - 1] + 1 != members.lengths).any())


def longest(members) -> torch.Tensor:
    """[N] the longest of its group, by action tokens or by position."""
    found = torch.zeros(len(members.lengths), dtype=torch.bool)
    for ends in (members.lengths, members.positions[members.lengths.cumsum(0) - 1]):
        for group in members.groups.unique():
            own = members.groups == group
            found |= own & (ends == ends[own].max())
    return found


def test_the_value_loss_agrees():
    for number in CASES:
        predicted, old, returns = (
            torch.from_numpy(GOLDEN[f"{number}/{name}"]) for name in ("predicted", "values", "returns")
        )
        made = value_loss(predicted, old, returns, clip=0.5)
        agree(torch.stack([made.values.mean(), made.clipped.double().mean()]), of_verl(number, "value_loss"))


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_resampling_weights_agree(method):
    for number in CASES:
        members = case(number)
        scores = members.rewards.clone().index_add_(0, members.sequence, members.token_rewards)
        agree(resample_weights(scores, Resample(method=method, power=1.5)), of_verl(number, f"resample/{method}"))


def test_the_overlong_penalty_agrees_up_to_the_longest_answer():
    for number in CASES:
        lengths = case(number).lengths
        ours = overlong_penalty(lengths, Overlong(buffer=4, max=12), limit=14)
        agree(ours, of_verl(number, "overlong").clamp(min=-1))
        agree(ours, of_verl(number, "overlong"), lengths <= 12)
