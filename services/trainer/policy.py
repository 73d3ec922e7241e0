"""The policy: one optimizer update of it.

Log-probabilities are of log_softmax(z / T) with the temperature that the samples were drawn at, over the
survivors of top_p / top_k where the sampler stored them: an unchanged policy reads a ratio of 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.kl import Mismatch, mismatch
from async_rl.config.schema import Config
from async_rl.services.trainer.logits import Logits
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.packing import Pack
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.routing import replay_routing
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.schedule import total_updates
from async_rl.services.trainer.trained import Trained


class Update(NamedTuple):
    """One optimizer update. Sums are over the loss tokens that needed a forward pass."""

    loss: float
    tokens: int
    entropy: float  # sum, nats
    clipped: int
    reference_kl: float  # sum of k3 to the reference policy; 0 without one
    weight: float  # sum of the importance weights; `tokens` without any
    rejected: int  # tokens that the correction left out
    gradient_norm: float  # before clipping
    learning_rate: float
    mismatch: Mismatch  # behaviour against the policy as it was before this update, before anything is cut
    skipped: str | None  # why the weights were left as they were


class Policy(Trained):
    """`model` is trained in place."""

    def __init__(self, model: Any, config: Config, ranks: Ranks | None = None) -> None:
        super().__init__(model, config, config.trainer, total_updates(config), "policy", ranks)
        self._seed = config.seed
        self.replays = config.trainer.router_replay
        if self.replays:
            replay_routing(model)

    def update(self, samples: Sequence[Sample], objective: Objective) -> Update:
        """One optimizer update with `samples`, of which this rank takes its share."""
        before = sum(sample.trained for sample in samples)
        if objective.looks_ahead:
            samples = objective.look_ahead(samples, self.logprobs(samples), self._noise(samples))
        totals = objective.totals(samples)
        seen: list[Mismatch] = []

        def loss(pack: Pack, logits: Logits) -> tuple[Tensor, Tensor]:
            logprobs, entropy = self.of_tokens(pack, logits, entropy_graph=objective.settings.entropy > 0)
            finite = pack.finite
            seen.append(mismatch(logprobs[finite], pack.behaviour[finite], pack.lag[finite]))
            part = objective.loss(pack, logprobs, entropy, totals)
            inside = pack.loss
            figures = [part.loss, inside.sum(), entropy[inside].sum(), part.clipped[inside].sum()]
            return part.loss, torch.stack([*figures, part.reference_kl[inside].sum(), part.weights[inside].sum()])

        passed = [sample for sample in samples if objective.needs_pass(sample)]
        total, tokens, entropy, clipped, reference_kl, weight = self.minimise(passed, loss, figures=6)
        stepped = self.step()
        return Update(
            loss=total,
            tokens=int(tokens),
            entropy=entropy,
            clipped=int(clipped),
            reference_kl=reference_kl,
            weight=weight,
            rejected=before - sum(sample.trained for sample in samples),
            gradient_norm=stepped.gradient_norm,
            learning_rate=stepped.learning_rate,
            mismatch=self._over_ranks(sum(seen, start=Mismatch.none())),
            skipped=stepped.skipped,
        )

    def _noise(self, samples: Sequence[Sample]) -> Tensor:
        """[A] in [0, 1) for the action tokens of `samples`: the same on every rank, and when the step is redone."""
        count = sum(len(sample.action) for sample in samples)
        return torch.from_numpy(np.random.default_rng([self._seed, self.updates]).random(count))

    def _over_ranks(self, own: Mismatch) -> Mismatch:
        if self._ranks.size == 1:
            return own
        own = own if self._ranks.counts else Mismatch.none()
        extent = self._ranks.max_(torch.tensor([float(len(own.sums)), own.max_ratio], dtype=torch.float64))
        padded = (own + Mismatch(torch.zeros(int(extent[0]), 5, dtype=torch.float64), 0.0)).sums
        return Mismatch(self._ranks.sum_(padded), float(extent[1]))
