"""Policy losses: per token, before aggregation and before any mask.

`old` are the behaviour log-probabilities as they were stored when the token was sampled. They are never
computed again with the current weights: the ratio would be 1 everywhere and the clip switched off.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """The action tokens of whole trajectories, one after the other."""

    logprobs: Tensor  # [A] under the policy that is updated; carries the gradient
    old: Tensor  # [A] what the ratio is taken against; finite
    advantages: Tensor  # [A]
    loss: Tensor  # [A] bool, the tokens that enter the loss
    sequence: Tensor  # [A] int64, which of the S trajectories a token belongs to
    sequences: int  # S


class TokenLoss(NamedTuple):
    values: Tensor  # [A]
    clipped: Tensor  # [A] bool, the clip took the token's gradient away


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """[A] lp - old clamped to +-20, so that its exponential stays finite."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> TokenLoss:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0 at most -dual_clip A.

    Schulman et al. 2017 (arXiv:1707.06347); the two bounds: Yu et al. 2025 (DAPO, arXiv:2503.14476); the dual
    clip: Ye et al. 2019 (arXiv:1912.09729).
    """
    ratio = log_ratio(logprobs, old).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(plain, bounded)
    ceiling = -dual_clip * advantages
    values = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    clipped = (bounded > plain) | ((advantages < 0) & (pessimistic > ceiling))
    return TokenLoss(values, clipped.detach())
