"""What an update of the policy minimises: loss, correction, aggregation, KL and entropy, by `[algorithm]`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.aggregation import Totals, weighted_sum
from async_rl.algorithms.corrections import importance_weights, loglinear_old, rejected
from async_rl.algorithms.kl import k3, penalty
from async_rl.algorithms.losses import log_ratio
from async_rl.algorithms.members import Tokens
from async_rl.algorithms.registry import AGGREGATIONS, PolicyLoss, Weigh, policy_loss
from async_rl.config.algorithms import Algorithm, Correction
from async_rl.config.modes import correction
from async_rl.config.schema import Config
from async_rl.services.trainer.packing import Columns, Pack, columns
from async_rl.services.trainer.samples import Sample, with_columns


class Part(NamedTuple):
    """A micro-batch's part of the update's loss (a scalar; the parts add up), and figures of its tokens [A]."""

    loss: Tensor
    clipped: Tensor  # bool
    reference_kl: Tensor  # k3 to the reference policy, 0 without one
    weights: Tensor  # of the correction, 1 without


@dataclass(frozen=True)
class Objective:
    """`horizon`: algorithm.horizon, by default the most tokens that a completion can have.
    `kl`: the coefficient of now, of the part that is in the loss."""

    settings: Algorithm
    correction: Correction
    policy_loss: PolicyLoss
    weigh: Weigh
    horizon: int
    kl: float = 0.0

    @classmethod
    def of(cls, config: Config, kl: float = 0.0) -> "Objective":
        settings = config.algorithm
        chosen = policy_loss(settings.loss)
        return cls(
            settings,
            correction(config),
            chosen,
            AGGREGATIONS[settings.aggregation or chosen.aggregation],
            settings.horizon or config.sampling.max_new_tokens,
            kl,
        )

    @property
    def looks_ahead(self) -> bool:
        """Something depends on statistics of the whole update under the policy of now: a pass without a gradient
        over all of its samples comes first."""
        weights = self.correction.weights
        normalised = weights is not None and weights.normalize
        return self.policy_loss.choose is not None or bool(self.correction.rejections) or normalised

    def needs_pass(self, sample: Sample) -> bool:
        """Whether `sample` adds to the gradient of this objective.

        Where the loss is proportional to the advantage, a member of advantage 0 (its group's rewards were
        equal) adds nothing: neither a forward nor a backward pass is spent on it. It still counts in the
        denominators, so the gradient is the same.
        """
        proportional = self.policy_loss.proportional and not self.kl and not self.settings.entropy
        return sample.carries if proportional else sample.trained > 0

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Denominators of the update that trains `samples`."""
        trained = [sample.trained for sample in samples]
        return Totals(tokens=sum(trained), sequences=sum(n > 0 for n in trained))

    def look_ahead(self, samples: Sequence[Sample], logprobs: Tensor, noise: Tensor) -> list[Sample]:
        """`samples` of a whole update with what its statistics decide: rejected tokens out of the loss, weights,
        the loss's choice. logprobs [A]: under the policy of now. noise [A]: in [0, 1)."""
        tokens = self._tokens(logprobs, Columns(**columns(samples)))
        log_r, kept = self._log_r(tokens), tokens.loss
        for settings in self.correction.rejections:
            kept = kept & ~rejected(log_r, tokens.advantages, kept, tokens.sequence, tokens.sequences, settings)
        tokens = replace(tokens, loss=kept)
        made = {"loss": kept}
        if self.correction.weights is not None:
            made["weights"] = self._weights(tokens, log_r)
        if self.policy_loss.choose is not None:
            made["chosen"] = self.policy_loss.choose(tokens, self.settings.loss, noise)
        return with_columns(samples, made)

    def loss(self, pack: Pack, logprobs: Tensor, entropy: Tensor, totals: Totals) -> Part:
        """Of a micro-batch under the policy's log-probabilities [A], which carry the gradient, and entropies [A]."""
        tokens = self._tokens(logprobs, pack)
        made = self.policy_loss.evaluate(tokens, self.settings.loss)
        values, weights = made.values, torch.ones_like(logprobs)
        if self.correction.weights is not None:
            weights = self._weights(tokens, self._log_r(tokens)) if pack.weights is None else pack.weights
            weights = weights.to(logprobs.dtype)
            values = values * weights
        reference_kl = torch.zeros_like(logprobs.detach())
        if pack.reference is not None:
            reference = pack.reference.to(logprobs.dtype)
            reference_kl = k3(log_ratio(reference, logprobs.detach()))
            if self.kl and self.settings.kl is not None:
                values = values + self.kl * penalty(logprobs, reference, self.settings.kl.estimator)
        if self.settings.entropy:
            values = values - self.settings.entropy * entropy
        mask = pack.loss.to(logprobs.dtype)
        shares = self.weigh(mask, pack.sequence, pack.sequences, totals, self.horizon)
        return Part(weighted_sum(values, shares), made.clipped, reference_kl, weights)

    def _tokens(self, logprobs: Tensor, given: Columns) -> Tokens:
        """With the proximal policy that the correction names. A token whose behaviour is not known reads ratio 1."""
        now = logprobs.detach()
        behaviour = torch.where(given.finite, given.behaviour.to(now.dtype), now)
        match self.correction.proximal:
            case "behaviour":
                proximal = behaviour
            case "recompute":  # of a step's only update the policy before it is that of now
                proximal = now if given.old is None else given.old.to(now.dtype)
            case "loglinear":
                proximal = loglinear_old(behaviour, now, -given.lag, 0)
        return Tokens(
            logprobs=logprobs,
            old=proximal,
            behaviour=behaviour,
            advantages=given.advantages.to(now.dtype),
            loss=given.loss,
            sequence=given.sequence,
            sequences=given.sequences,
            chosen=given.chosen,
        )

    def _log_r(self, tokens: Tokens) -> Tensor:
        """[A] log ratio of the importance weights: proximal over behaviour; where they are one, of now over it."""
        newer = tokens.logprobs.detach() if self.correction.proximal == "behaviour" else tokens.old
        return log_ratio(newer, tokens.behaviour)

    def _weights(self, tokens: Tokens, log_r: Tensor) -> Tensor:
        assert self.correction.weights is not None
        return importance_weights(log_r, tokens.loss, tokens.sequence, tokens.sequences, self.correction.weights)
