"""The implicit reward model of PRIME: a policy whose log-ratio to the reference says what each token was worth. It
learns from the outcomes of the steps (Cui et al. 2025, arXiv:2502.01456)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from async_rl.algorithms.value import outcome_loss
from async_rl.config.algorithms import PRIME
from async_rl.config.schema import Config
from async_rl.services.trainer.logits import Logits
from async_rl.services.trainer.packing import Pack
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.trained import Trained


class OutcomeUpdate(NamedTuple):
    loss: float  # cross-entropy, mean over the trajectories
    accuracy: float  # share of them on the right side
    gradient_norm: float


class RewardModel(Trained):
    def __init__(self, model: Any, config: Config, table: PRIME, ranks: Ranks | None = None) -> None:
        settings = msgspec.structs.replace(
            config.trainer, learning_rate=table.learning_rate, schedule="constant", warmup_steps=0
        )
        super().__init__(model, config, settings, 1, "reward model", ranks)
        self._beta = table.beta

    def update(self, samples: Sequence[Sample]) -> OutcomeUpdate:
        """On the outcomes of `samples`, which have their `reference`; those without a token in the loss are left
        out."""
        trained = [sample for sample in samples if sample.trained]
        count = len(trained)

        def loss(pack: Pack, logits: Logits) -> tuple[Tensor, Tensor]:
            assert pack.reference is not None
            implicit = self.of_tokens(pack, logits)[0].double() - pack.reference
            sums = torch.zeros(pack.sequences, dtype=torch.float64, device=implicit.device)
            sums = sums.index_add(0, pack.sequence, implicit)
            part = outcome_loss(sums, pack.outcomes.double(), self._beta).sum() / max(count, 1)
            return part, torch.stack([part, ((sums > 0) == (pack.outcomes > 0.5)).sum()])

        total, right = self.minimise(trained, loss, figures=2)
        return OutcomeUpdate(total, right / max(count, 1), self.step().gradient_norm)
