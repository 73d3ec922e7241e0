"""Advantage estimators: what a member's reward is worth against its group.

Statistics are over voting members: a failed or abstaining member has no vote in them, and its own advantage
is 0. A member whose loss tokens are all masked still votes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.trajectory import EQUAL

EPSILON = 1e-6


class Members(NamedTuple):
    """The N members of a step, in the order of the draw; A is the sum of their lengths."""

    rewards: Tensor  # [N] float64, 0 where the member has no vote
    votes: Tensor  # [N] bool
    groups: Tensor  # [N] int64, position of the member's group in the draw
    lengths: Tensor  # [N] int64, action tokens
    group_size: int  # as configured; a group may hold fewer


def grpo(rewards: Tensor, votes: Tensor, groups: Tensor, *, group_size: int, normalize_by_std: bool = True) -> Tensor:
    """[N] (R - mu) / (sigma + 1e-6) within each group (Shao et al. 2024, arXiv:2402.03300).

    mu and sigma (unbiased) are over the group's voting members; `normalize_by_std=False` leaves the division
    out (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). A group configured as one has mu = 0 and sigma = 1; a
    larger group left with a single voter has nothing to compare with and gets 0, and so does a group of
    rewards that are equal up to float noise.
    """
    size = int(groups.max()) + 1 if groups.numel() else 0
    rewards = torch.where(votes, rewards, 0.0)
    if group_size == 1:
        return rewards / (1.0 + EPSILON) if normalize_by_std else rewards
    voters = _per_group(votes.to(rewards.dtype), groups, size)
    mean = _per_group(rewards, groups, size) / voters.clamp(min=1)
    centred = torch.where(votes, rewards - mean[groups], 0.0)
    largest = _largest(rewards.abs(), groups, size)
    compares = (voters > 1) & (_largest(centred.abs(), groups, size) > EQUAL * largest)
    if normalize_by_std:
        sigma = (_per_group(centred**2, groups, size) / (voters - 1).clamp(min=1)).sqrt()
        centred = centred / (sigma[groups] + EPSILON)
    return torch.where(compares[groups], centred, 0.0)


def zero_variance(members: Members) -> Tensor:
    """[groups] bool: groups of at least one voter whose voters' rewards are all equal, up to float noise."""
    size = int(members.groups.max()) + 1 if members.groups.numel() else 0
    centred = grpo(members.rewards, members.votes, members.groups, group_size=2, normalize_by_std=False)
    voters = _per_group(members.votes.to(torch.float64), members.groups, size)
    return (voters > 0) & (_largest(centred.abs(), members.groups, size) == 0)


def over_tokens(values: Tensor, lengths: Tensor) -> Tensor:
    """[A] the value of its member for each action token."""
    return values.repeat_interleave(lengths)


def _per_group(values: Tensor, groups: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype).index_add_(0, groups, values)


def _largest(values: Tensor, groups: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype).scatter_reduce(0, groups, values, "amax")
