"""Rewards against those of the same group, and the rules about who votes.

Statistics are over voting members: a failed or abstaining one has no part in them, and its advantage is 0. A member
whose loss tokens are all masked still votes. A group configured as one has mean 0 and deviation 1. A larger group
left with a single voter has nothing to compare with and gets 0; so does one of rewards equal up to float noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.members import Members
from async_rl.trajectory import EQUAL

EPSILON = 1e-6
LARGEST = 1e30
"""Rewards are held within this: their squares stay finite here, and what comes of them as float32 in the update."""


class Compared(NamedTuple):
    rewards: Tensor  # [N] 0 without a vote
    centred: Tensor  # [N] R - mean of the group, 0 where there is nothing to compare
    counted: Tensor  # [N] bool, voters that are not alone in a group meant to be larger
    mean: Tensor  # [groups]
    deviation: Tensor  # [groups] unbiased
    voters: Tensor  # [groups] float64


def compared(rewards: Tensor, members: Members) -> Compared:
    """`rewards` [N] within the groups of `members`."""
    votes, groups = members.votes, members.groups
    rewards = torch.where(votes, rewards.clamp(-LARGEST, LARGEST), 0.0)
    voters = per_group(votes.double(), groups)
    if members.group_size == 1:
        return Compared(rewards, rewards, votes, torch.zeros_like(voters), torch.ones_like(voters), voters)
    mean = per_group(rewards, groups) / voters.clamp(min=1)
    centred = torch.where(votes, rewards - mean[groups], 0.0)
    differs = largest(centred.abs(), groups) > EQUAL * largest(rewards.abs(), groups)
    centred = torch.where((differs & (voters > 1))[groups], centred, 0.0)
    deviation = (per_group(centred**2, groups) / (voters - 1).clamp(min=1)).sqrt()
    return Compared(rewards, centred, votes & (voters > 1)[groups], mean, deviation, voters)


def leave_one_out(group: Compared, members: Members) -> Tensor:
    """[N] n / (n - 1) (R - mu), 0 for a group of one."""
    n = group.voters[members.groups]
    return torch.where(n > 1, group.centred * n / (n - 1).clamp(min=1), 0.0)


def outcomes(members: Members) -> Tensor:
    """[N] all that a member was rewarded with: its score, and what was added at its tokens."""
    added = torch.zeros_like(members.rewards).index_add_(0, members.sequence, members.token_rewards)
    return torch.where(members.votes, members.rewards + added, 0.0).clamp(-LARGEST, LARGEST)


def difference(first: Tensor, second: Tensor) -> Tensor:
    """first - second, exactly 0 where they are equal up to float noise."""
    apart = first - second
    return torch.where(apart.abs() > EQUAL * torch.maximum(first.abs(), second.abs()), apart, 0.0)


def per_group(values: Tensor, groups: Tensor) -> Tensor:
    """[groups] the sum of `values` [N]."""
    return values.new_zeros(_count(groups)).index_add_(0, groups, values)


def largest(values: Tensor, groups: Tensor) -> Tensor:
    """[groups] the largest of `values` [N], which are not negative."""
    return values.new_zeros(_count(groups)).scatter_reduce(0, groups, values, "amax")


def _count(groups: Tensor) -> int:
    return int(groups.max()) + 1 if groups.numel() else 0
