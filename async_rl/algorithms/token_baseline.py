"""Baselines of their own for each position of a group's trajectories."""

import torch
from torch import Tensor

from async_rl.algorithms.groups import LARGEST, difference, largest, per_group
from async_rl.algorithms.members import Estimate, Members
from async_rl.algorithms.returns import discounted, rewards_of_tokens
from async_rl.config.algorithms import OptimalTokenBaseline, TIROptimalTokenBaseline

EPSILON = 1e-8


def optimal_token_baseline(members: Members, settings: OptimalTokenBaseline) -> Estimate:
    """[A] G_t - B_t, B_t = sum of G W / (sum of W + 1e-8) over the voters of the group that act at position t.

    G is the return from t on. W_t is the squared length of the score function up to t, as far as the logits see it:
    the cumulative sum of 1 - 2 pi + sum of pi^2 over the vocabulary, times the squared weight of the correction
    where there is one. Where only the longest member is left, B is 0. After verl 0.9's estimator of the same name.

    Ours differs from it where a tool wrote between action tokens: there, "longest" and the place from which B is 0
    are taken by position in both; verl counts action tokens and then uses the number as a position.
    """
    return Estimate(_against_baseline(members, members.positions))


def tir_optimal_token_baseline(members: Members, settings: TIROptimalTokenBaseline) -> Estimate:
    """[A] The same with positions counted over action tokens alone, so that the k-th tokens that the members sampled
    are compared, whatever their tools wrote in between."""
    first = members.lengths.cumsum(0) - members.lengths
    return Estimate(_against_baseline(members, torch.arange(len(members.positions)) - members.over_tokens(first)))


def _against_baseline(members: Members, positions: Tensor) -> Tensor:
    returns = discounted(rewards_of_tokens(members), members.lengths, 1.0)
    if members.group_size == 1:
        return returns
    votes, group = members.over_tokens(members.votes), members.over_tokens(members.groups)
    weights = torch.where(votes, _path_weights(members), 0.0)
    width = int(positions.max()) + 1 if positions.numel() else 1
    # members of one group at one position: what an average is over
    places, place = torch.unique(group * width + positions, return_inverse=True)
    weight = weights.new_zeros(len(places)).index_add_(0, place, weights)
    weighted = weights.new_zeros(len(places)).index_add_(0, place, weights * returns)
    shared = positions < _second_end(members, positions)[group]
    baseline = torch.where(shared, (weighted / (weight + EPSILON))[place], 0.0)
    compares = votes & (per_group(members.votes.double(), members.groups) > 1)[group]
    return torch.where(compares, difference(returns, baseline), 0.0)


def _path_weights(members: Members) -> Tensor:
    """[A] W, the cumulative sum of a token's squared score, times the squared weight of the correction."""
    assert members.old is not None and members.sum_pi_squared is not None
    # not negative but for rounding, which could make the sum of W vanish
    squares = (1 - 2 * members.old.exp() + members.sum_pi_squared).clamp(0, LARGEST)
    if members.weights is not None:
        squares = squares * members.weights.clamp(-LARGEST, LARGEST) ** 2
    parts = torch.split(squares, members.lengths.tolist())
    return torch.cat([part.cumsum(0) for part in parts]) if parts else squares


def _second_end(members: Members, positions: Tensor) -> Tensor:
    """[groups] where the second longest of the voters ends: from there on the longest is alone."""
    ends = torch.where(members.votes, positions[members.lengths.cumsum(0) - 1] + 1, 0)
    last = largest(ends, members.groups)
    longest = ends == last[members.groups]
    shared = per_group(longest.long(), members.groups) > 1
    return torch.where(shared, last, largest(torch.where(longest, 0, ends), members.groups))
