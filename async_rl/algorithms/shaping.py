"""What is done to rewards before advantages, and to the choice of members after them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.groups import LARGEST
from async_rl.algorithms.members import Members
from async_rl.config.algorithms import Overlong, Resample
from async_rl.trajectory import EQUAL

FLOOR = 1e-8
"""Weight of a member that the method would never draw."""


def overlong_penalty(lengths: Tensor, settings: Overlong, limit: int) -> Tensor:
    """[N] float64: 0 up to max - buffer tokens, from there linearly down to -factor at max, and no lower (Yu et al.
    2025, arXiv:2503.14476). lengths [N]: action tokens; limit: `max` where the settings name none.

    verl goes on below -factor where a length can be above max; the paper does not.
    """
    longest = settings.max or limit
    over = (lengths.double() - (longest - settings.buffer)) / settings.buffer
    return -settings.factor * over.clamp(0, 1)


def resample_weights(rewards: Tensor, settings: Resample) -> Tensor:
    """[N] weights of members in the draw of PF-PPO (Shen et al. 2024, arXiv:2409.06957), each plus 1e-8.

    `pow`: abs(R)^power. `max_min`: 1 for the best and the worst, 0 for the others. `max_random`: 0.4 for the best,
    0.1 for the others. Rewards that are equal to the best up to float noise are the best.
    """
    if not len(rewards):
        return rewards
    noise = EQUAL * rewards.abs().max()
    best = rewards >= rewards.max() - noise
    match settings.method:
        case "pow":
            weights = (rewards.abs() ** settings.power).clamp(max=LARGEST)
        case "max_min":
            weights = (best | (rewards <= rewards.min() + noise)).double()
        case "max_random":
            weights = 0.1 + 0.3 * best.double()
    return weights + FLOOR


def resampled(members: Members, settings: Resample, seed: Sequence[int]) -> Tensor:
    """[N] int64, ascending: which members are trained, drawn with replacement from those that vote. All of them,
    once each, where nobody votes."""
    voters = torch.nonzero(members.votes)[:, 0]
    everyone = len(members.votes)
    if not len(voters):
        return torch.arange(everyone)
    weights = resample_weights(members.rewards[voters].clamp(-LARGEST, LARGEST), settings).numpy()
    drawn = np.random.default_rng(seed).choice(len(voters), everyone, p=weights / weights.sum())
    return voters[torch.from_numpy(np.sort(drawn))]
