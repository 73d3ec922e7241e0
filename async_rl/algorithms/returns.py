"""Advantage estimators that differ from token to token: sums of what was rewarded from a token on.

The steps of an episode are action tokens, one after the other: what a tool wrote between two of them is no step, and
nothing is discounted over it. A member's outcome is rewarded at its last action token, beside the token rewards.
"""

import torch
from torch import Tensor

from async_rl.algorithms.groups import LARGEST, compared, difference, leave_one_out, outcomes
from async_rl.algorithms.members import Estimate, Members
from async_rl.algorithms.whitening import whitened
from async_rl.config.algorithms import GAE, PRIME, ReinforcePlusPlus, ReMax


def gae(members: Members, settings: GAE) -> Estimate:
    """[A] W(A), A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token
    (Schulman et al. 2016, arXiv:1506.02438). The returns, before whitening, are A + V; V where a member has no vote.
    """
    assert members.values is not None
    values = members.values.clamp(-LARGEST, LARGEST)
    after = torch.cat([values[1:], values.new_zeros(1)])
    after[_last(members)] = 0.0
    delta = rewards_of_tokens(members) + settings.gamma * after - values
    advantages = discounted(delta, members.lengths, settings.gamma * settings.lam)
    advantages = torch.where(members.over_tokens(members.votes), advantages, 0.0)
    return Estimate(whitened(advantages, members, members.votes), returns=advantages + values)


def reinforce_plus_plus(members: Members, settings: ReinforcePlusPlus) -> Estimate:
    """[A] W(G), G_t = r_t + gamma G_{t+1} (Hu et al. 2025, arXiv:2501.03262)."""
    returns = discounted(rewards_of_tokens(members), members.lengths, settings.gamma)
    return Estimate(whitened(returns, members, members.votes))


def remax(members: Members, settings: ReMax) -> Estimate:
    """[A] G_t - b, b the reward of the greedy trajectory of the same prompt (Li et al. 2024, arXiv:2310.10505).

    A group whose greedy trajectory has no vote has nothing to compare with and gets 0.
    """
    assert members.greedy is not None
    baseline = members.greedy[members.groups].clamp(-LARGEST, LARGEST)
    counted = members.votes & torch.isfinite(baseline)
    returns = discounted(rewards_of_tokens(members), members.lengths, 1.0)
    advantages = difference(returns, members.over_tokens(torch.where(counted, baseline, 0.0)))
    return Estimate(torch.where(members.over_tokens(counted), advantages, 0.0))


def prime(members: Members, settings: PRIME) -> Estimate:
    """[A] W(G), G_t the sum from t on of c_implicit RLOO(implicit rewards) + c_outcome RLOO(outcome), the latter at
    the last token (Cui et al. 2025, arXiv:2502.01456).

    The implicit reward of a token is beta (log pi_prm - log pi_reference). Its leave-one-out form is
    n/(n-1) r_t - the sum of the voters' mean rewards / (n-1), the mean being over a member's tokens. The division of
    implicit rewards by their largest sum in the step, which the paper's code can do before, is left out: W follows.
    """
    assert members.implicit is not None
    sequence, groups = members.sequence, members.groups
    implicit = settings.beta * members.implicit.clamp(-LARGEST, LARGEST)
    sums = torch.zeros_like(members.rewards).index_add_(0, sequence, implicit)
    own = compared(sums / members.lengths.clamp(min=1), members)
    n = own.voters[groups]
    scale = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    tokens = members.over_tokens(scale) * (implicit - members.over_tokens(own.mean[groups]))
    outcome = leave_one_out(compared(outcomes(members), members), members)
    rewards = settings.implicit * tokens
    rewards[_last(members)] += settings.outcome * outcome
    returns = discounted(rewards, members.lengths, 1.0)
    counted = members.votes & (n > 1)
    return Estimate(whitened(torch.where(members.over_tokens(counted), returns, 0.0), members, counted))


def rewards_of_tokens(members: Members) -> Tensor:
    """[A] token rewards, and at each member's last token its outcome; 0 where it has no vote."""
    rewards = members.token_rewards.clamp(-LARGEST, LARGEST)
    rewards[_last(members)] += members.rewards.clamp(-LARGEST, LARGEST)
    return torch.where(members.over_tokens(members.votes), rewards, 0.0)


def discounted(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """[A] S_t = x_t + factor S_{t+1} within each member; after its last token S is 0."""
    sums, start = values.tolist(), 0
    for length in lengths.tolist():
        for t in range(start + length - 2, start - 1, -1):
            sums[t] += factor * sums[t + 1]
        start += length
    return torch.tensor(sums, dtype=torch.float64)


def _last(members: Members) -> Tensor:
    """[N] the place of each member's last action token."""
    return members.lengths.cumsum(0) - 1
