"""What the two models that learn beside the policy minimise: the critic, and PRIME's reward model."""

import torch
from torch import Tensor

from async_rl.algorithms.members import TokenLoss


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> TokenLoss:
    """[A] half of max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2): a value that has gone further than
    `clip` from the one before the step, `old`, towards the return pulls no more (Schulman et al. 2017,
    arXiv:1707.06347).

    values carries the gradient; returns is Estimate.returns.
    """
    plain = (values - returns) ** 2
    bounded = (values.clamp(old - clip, old + clip) - returns) ** 2
    return TokenLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())


def outcome_loss(sums: Tensor, outcomes: Tensor, beta: float) -> Tensor:
    """[S] cross-entropy of sigmoid(beta sum), sum [S] a trajectory's sum of log pi_prm - log pi_reference over its
    action tokens, to its outcome [S] (Cui et al. 2025, arXiv:2502.01456). Rewards outside [0, 1] are taken for the
    nearer end: a cross-entropy to anything else has no least value.
    """
    return torch.nn.functional.binary_cross_entropy_with_logits(beta * sums, outcomes.clamp(0, 1), reduction="none")
