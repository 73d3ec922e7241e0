"""Advantage estimators that compare a member's reward with those of its group; every token of it gets the same.

R is all that a member was rewarded with (groups.outcomes); mu, sigma and n are the mean, unbiased deviation and
number of its group's voters. groups.py has the rules about votes. Where published code gives a member that was left
alone its plain reward, ours gives 0: there is nothing to say whether that is much or little.
"""

from dataclasses import replace

import torch
from torch import Tensor

from async_rl.algorithms.groups import (
    EPSILON,
    Compared,
    compared,
    difference,
    largest,
    leave_one_out,
    outcomes,
    per_group,
)
from async_rl.algorithms.members import Estimate, Members
from async_rl.algorithms.whitening import whitened
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
from async_rl.errors import UserError, nearest
from async_rl.trajectory import EQUAL


def zero_variance(members: Members) -> Tensor:
    """[groups] bool: groups of at least one voter whose voters' rewards are all equal, up to float noise."""
    group = compared(members.rewards, replace(members, group_size=2))  # a single voter is equal to itself
    return (group.voters > 0) & (largest(group.centred.abs(), members.groups) == 0)


def grpo(members: Members, settings: GRPO) -> Estimate:
    """[A] (R - mu) / (sigma + 1e-6) (Shao et al. 2024, arXiv:2402.03300).

    `normalize_by_std = false` leaves the division out (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    """
    return Estimate(members.over_tokens(_grpo(compared(outcomes(members), members), members, settings)))


def _grpo(group: Compared, members: Members, settings: GRPO) -> Tensor:
    return group.centred / (group.deviation + EPSILON)[members.groups] if settings.normalize_by_std else group.centred


def gdpo(members: Members, settings: GDPO) -> Estimate:
    """[A] W(sum over k of w_k (r_k - mu_k) / (sigma_k + 1e-6)) (Liu et al. 2026, arXiv:2601.05242).

    r_k are the reward components that the grader names; the reward itself, and what was added at tokens, are not
    among them. Each is normalised before it is weighed, so that none drowns the others.
    """
    total = torch.zeros_like(members.rewards)
    counted = members.votes
    for name, weight in settings.weights.items():
        group = compared(_component(members, name), members)
        total = total + weight * _grpo(group, members, GRPO())
        counted = group.counted
    return Estimate(whitened(members.over_tokens(total), members, counted))


def _component(members: Members, name: str) -> Tensor:
    """[N]; a name that no voter of the step has is a mistake in the configuration."""
    if name not in members.components and members.votes.any():
        raise UserError(
            f"algorithm.advantage.weights.{name}: the grader gives no such component{nearest(name, members.components)}"
        )
    return members.components.get(name, torch.zeros_like(members.rewards))


def grpo_passk(members: Members, settings: GRPOPassK) -> Estimate:
    """[A] The best member of a group: (r1 - r2) / (sigma + 1e-6), r2 the second best; all others 0
    (Chen et al. 2025, arXiv:2503.19595). Two that share the best place get 0, and so does a group of one.
    """
    rewards, groups = outcomes(members), members.groups
    group = compared(rewards, members)
    advantages = torch.zeros_like(rewards)
    for number, voters in enumerate(group.voters.tolist()):
        if voters < 2:
            continue
        own = torch.nonzero((groups == number) & members.votes)[:, 0]
        best = rewards[own].topk(2)
        lead = difference(best.values[0], best.values[1])
        advantages[own[best.indices[0]]] = (
            lead / (group.deviation[number] + EPSILON) if settings.normalize_by_std else lead
        )
    # rewards that are equal up to float noise have no best one
    return Estimate(members.over_tokens(torch.where(group.centred != 0, advantages, 0.0)))


def reinforce_plus_plus_baseline(members: Members, settings: ReinforcePlusPlusBaseline) -> Estimate:
    """[A] W(R - mu) (Hu et al. 2025, arXiv:2501.03262).

    A group of equal rewards enters W as 0 and comes out with the step's mean taken off.
    """
    group = compared(outcomes(members), members)
    return Estimate(whitened(members.over_tokens(group.centred), members, group.counted))


def rloo(members: Members, settings: RLOO) -> Estimate:
    """[A] R - mean of the others = n / (n - 1) (R - mu) (Ahmadian et al. 2024, arXiv:2402.14740).

    `normalize_by_std` divides by the others' deviation + 1e-6, and by nothing where the others are equal up to float
    noise or only one. A group of one gets 0, also where it was configured so: there are no others.
    """
    group = compared(outcomes(members), members)
    advantages = leave_one_out(group, members)
    if settings.normalize_by_std:
        # what is left of the squares without one's own: (n-1) sigma^2 - n/(n-1) (R - mu)^2, over n - 2
        n = group.voters[members.groups]
        squares = (n - 1) * group.deviation[members.groups] ** 2 - n / (n - 1).clamp(min=1) * group.centred**2
        others = (squares.clamp(min=0) / (n - 2).clamp(min=1)).sqrt()
        differ = others > EQUAL * largest(group.rewards.abs(), members.groups)[members.groups]
        advantages = torch.where(differ, advantages / (others + EPSILON), advantages)
    return Estimate(members.over_tokens(advantages))


def opo(members: Members, settings: OPO) -> Estimate:
    """[A] R - sum of l R / sum of l over the group's voters, l the number of action tokens: the baseline of least
    variance if a gradient's square grows with its length (Hao et al. 2025, arXiv:2505.23585).
    """
    group = compared(outcomes(members), members)
    if members.group_size == 1:
        return Estimate(members.over_tokens(group.centred))
    lengths = torch.where(members.votes, members.lengths, 0).double()
    # of R - mu instead of R: the same, and exactly 0 for equal rewards
    baseline = per_group(lengths * group.centred, members.groups) / per_group(lengths, members.groups).clamp(min=1)
    advantages = torch.where(members.votes, group.centred - baseline[members.groups], 0.0)
    return Estimate(members.over_tokens(advantages))


def gpg(members: Members, settings: GPG) -> Estimate:
    """[A] alpha (R - mu) / f_norm, alpha = voters / voters whose R is not 0, of the step (Chu et al. 2025,
    arXiv:2504.02546): members of groups without a signal do not water the gradient down.
    """
    group = compared(outcomes(members), members)
    alpha = members.votes.sum() / torch.count_nonzero(group.rewards).clamp(min=1)
    return Estimate(members.over_tokens(alpha * group.centred / settings.f_norm))


def maxrl(members: Members, settings: MaxRL) -> Estimate:
    """[A] (R - mu) / mu: an unbiased estimate of a gradient between those of the expected reward and of the
    log-likelihood of success (Tajwar et al. 2026, arXiv:2602.02710).

    mu is a rate of success, so rewards are not negative. Where mu is not above float noise the advantage is 0: at 0
    nothing succeeded, and below it the division would turn the sign and train the worse answers.
    """
    group = compared(outcomes(members), members)
    known = group.mean > EQUAL * largest(group.rewards.abs(), members.groups)
    advantages = group.centred / torch.where(known, group.mean, 1.0)[members.groups]
    return Estimate(members.over_tokens(torch.where(known[members.groups], advantages, 0.0)))
