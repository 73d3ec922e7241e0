"""Members of a step for tests of the estimators."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from async_rl.algorithms.members import Members
from async_rl.algorithms.registry import ESTIMATORS
from async_rl.config.algorithms import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    PRIME,
    RLOO,
    GRPOPassK,
    MaxRL,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TIROptimalTokenBaseline,
)

SETTINGS = [
    GRPO(),
    GRPO(normalize_by_std=False),
    GDPO(weights={"accuracy": 1.0, "format": 0.25}),
    GRPOPassK(),
    GRPOPassK(normalize_by_std=False),
    GAE(gamma=0.97, lam=0.9),
    ReinforcePlusPlus(gamma=0.97),
    ReinforcePlusPlusBaseline(),
    ReMax(),
    RLOO(),
    RLOO(normalize_by_std=True),
    OPO(),
    GPG(f_norm=2.0),
    OptimalTokenBaseline(),
    TIROptimalTokenBaseline(),
    MaxRL(),
    PRIME(),
]
"""Every estimator, and every form of it."""


def estimate(members, settings):
    return ESTIMATORS[settings.kind].estimate(members, settings)


def of_members(members, settings):
    """The advantage of each member, where its tokens all have the same."""
    parts = torch.split(estimate(members, settings).advantages, members.lengths.tolist())
    assert all(bool((part == part[0]).all()) for part in parts)
    return [float(part[0]) for part in parts]


def members_of(rewards: Sequence[float | None], *, group_size=None, groups=None, lengths=None, **given) -> Members:
    """One group unless told otherwise, one token each unless told otherwise; None has no vote, and no loss."""
    lengths = torch.tensor(lengths or [1] * len(rewards))
    votes = torch.tensor([reward is not None for reward in rewards])
    made = {
        "rewards": torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64),
        "votes": votes,
        "groups": torch.tensor(groups or [0] * len(rewards)),
        "lengths": lengths,
        "group_size": group_size or len(rewards),
        "loss": votes.repeat_interleave(lengths),
        "positions": torch.cat([torch.arange(length) for length in lengths.tolist()]),
        "token_rewards": torch.zeros(int(lengths.sum()), dtype=torch.float64),
    }
    return Members(**{**made, **given})


def double(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


@st.composite
def steps(draw, numbers=None) -> Members:
    """Any step of a few groups, with all that any estimator asks for; `numbers`: what its figures are drawn from,
    log-probabilities and probabilities too."""
    chances, numbers = numbers, st.floats(-8, 8, width=32) if numbers is None else numbers
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    group_size = 1 if set(sizes) == {1} and draw(st.booleans()) else 4
    groups = np.repeat(np.arange(len(sizes)), sizes)
    lengths = draw(st.lists(st.integers(1, 4), min_size=len(groups), max_size=len(groups)))
    votes = draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)))
    tokens = sum(lengths)
    outcomes = st.one_of(st.sampled_from([0.0, 1.0]), numbers)

    def column(size, of=numbers):
        return double(draw(st.lists(of, min_size=size, max_size=size)))

    gaps = draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
    starts = np.cumsum([0, *lengths[:-1]])
    walked = np.cumsum(np.array(gaps) + 1)
    return Members(
        rewards=torch.where(torch.tensor(votes), column(len(groups), outcomes), 0.0),
        votes=torch.tensor(votes),
        groups=torch.from_numpy(groups),
        lengths=torch.tensor(lengths),
        group_size=group_size,
        loss=torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
        & torch.tensor(votes).repeat_interleave(torch.tensor(lengths)),
        positions=torch.from_numpy(walked - np.repeat(walked[starts], lengths)),
        token_rewards=column(tokens, st.one_of(st.just(0.0), numbers)),
        components={name: column(len(groups), outcomes) for name in ("accuracy", "format")},
        greedy=column(len(sizes), st.one_of(outcomes, st.just(float("nan")))),
        values=column(tokens),
        old=column(tokens, st.floats(-30, 0) if chances is None else chances),
        sum_pi_squared=column(tokens, st.floats(0, 1) if chances is None else chances),
        weights=draw(st.one_of(st.none(), st.just(True)))
        and column(tokens, st.floats(0, 4) if chances is None else chances),
        implicit=column(tokens),
    )
