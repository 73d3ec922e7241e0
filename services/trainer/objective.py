"""What an update minimises: the loss, the aggregation and their settings, by the names in `[algorithm]`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.algorithms.aggregation import Totals, weighted_sum
from async_rl.algorithms.losses import TokenLoss, Tokens
from async_rl.algorithms.registry import AGGREGATIONS, LOSSES, PolicyLoss, Weigh
from async_rl.config.schema import Algorithm, Config
from async_rl.services.trainer.packing import Pack
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample


@dataclass(frozen=True)
class Objective:
    """`horizon`: algorithm.horizon, by default the most tokens that a completion can have."""

    settings: Algorithm
    policy_loss: PolicyLoss
    weigh: Weigh
    horizon: int

    @classmethod
    def of(cls, config: Config) -> "Objective":
        settings = config.algorithm
        return cls(
            settings,
            LOSSES[settings.loss],
            AGGREGATIONS[settings.aggregation],
            settings.horizon or config.sampling.max_new_tokens,
        )

    def needs_pass(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient of this objective.

        Where the loss is proportional to the advantage, a member of advantage 0 (its group's rewards were
        equal) adds nothing: neither a forward nor a backward pass is spent on it. It still counts in the
        denominators, so the gradient is the same.
        """
        return sample.carries if self.policy_loss.proportional else sample.trained > 0

    def totals(self, samples: Sequence[Sample], ranks: Ranks) -> Totals:
        """Denominators of the update that trains `samples` on this rank, over all ranks."""
        trained = [sample.trained for sample in samples]
        both = ranks.sum_(torch.tensor([sum(trained), sum(n > 0 for n in trained)], dtype=torch.int64))
        return Totals(tokens=int(both[0]), sequences=int(both[1]))

    def loss(self, pack: Pack, logprobs: Tensor, totals: Totals) -> tuple[Tensor, TokenLoss]:
        """The micro-batch's part of the update's loss (a scalar; the parts add up), and the token losses."""
        mask = pack.loss.to(logprobs.dtype)
        token = self.policy_loss.evaluate(
            Tokens(
                logprobs=logprobs,
                old=pack.behaviour.to(logprobs.dtype),
                advantages=pack.advantages.to(logprobs.dtype),
                loss=pack.loss,
                sequence=pack.sequence,
                sequences=pack.sequences,
            ),
            self.settings,
        )
        weights = self.weigh(mask, pack.sequence, pack.sequences, totals, self.horizon)
        return weighted_sum(token.values, weights), token
