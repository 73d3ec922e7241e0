"""What a step knows of its trajectories, for estimators and losses: action tokens one after the other, no padding.

N members, A action tokens of all of them together, in the order of the draw. Of two masks, `action` is what the
policy sampled (returns, lengths and sequence ratios are over it), `loss` the part of it that is trained (sums,
denominators and whitening are over it).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Members:
    """The members of a whole step. What is None was not asked for by the estimator (registry.Estimator.needs)."""

    rewards: Tensor  # [N] float64, 0 where the member has no vote
    votes: Tensor  # [N] bool
    groups: Tensor  # [N] int64, position of the member's group in the draw
    lengths: Tensor  # [N] int64, action tokens
    group_size: int  # as configured; a group may hold fewer
    loss: Tensor  # [A] bool
    positions: Tensor  # [A] int64, from 0 at a member's first action token; what a tool wrote between counts, too
    token_rewards: Tensor  # [A] float64, beside the outcome: a KL penalty; mostly 0
    components: dict[str, Tensor] = field(default_factory=dict)  # [N] float64 each, 0 where a member has it not
    greedy: Tensor | None = None  # [groups] float64, reward of the greedy trajectory; NaN where it has no vote
    values: Tensor | None = None  # [A] float64, the critic's, of the state before the token
    old: Tensor | None = None  # [A] float64, log-probabilities under the policy before the step
    sum_pi_squared: Tensor | None = None  # [A] float64, of the same policy over the vocabulary
    weights: Tensor | None = None  # [A] float64, of the correction
    implicit: Tensor | None = None  # [A] float64, log pi_prm - log pi_reference

    @property
    def sequence(self) -> Tensor:
        """[A] which member a token belongs to."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    def over_tokens(self, values: Tensor) -> Tensor:
        """[A] the value [N] of its member for each action token."""
        return values.repeat_interleave(self.lengths)


@dataclass(frozen=True)
class Estimate:
    advantages: Tensor  # [A] float64
    returns: Tensor | None = None  # [A] float64, what a critic learns


@dataclass(frozen=True)
class Tokens:
    """The action tokens of S whole trajectories, for a loss."""

    logprobs: Tensor  # [A] under the policy that is updated; carries the gradient
    old: Tensor  # [A] what the ratio is taken against, without a gradient; finite
    behaviour: Tensor  # [A] as sampled; finite
    advantages: Tensor  # [A]
    loss: Tensor  # [A] bool, the tokens that enter the loss
    sequence: Tensor  # [A] int64, which of the S trajectories a token belongs to
    sequences: int  # S
    chosen: Tensor | None = None  # [A] bool, of the loss's `choose`, made over the whole update


@dataclass(frozen=True)
class TokenLoss:
    values: Tensor  # [A]
    clipped: Tensor  # [A] bool, the token's gradient was taken away
