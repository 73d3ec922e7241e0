"""The critic: values of the states before each action token, for `gae`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from async_rl.algorithms.value import value_loss
from async_rl.config.schema import Config
from async_rl.services.trainer.logits import Logits
from async_rl.services.trainer.packing import Pack
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.trained import Trained


class ValueUpdate(NamedTuple):
    loss: float  # mean over the tokens in the loss
    clipped: float  # share of them
    gradient_norm: float


class Critic(Trained):
    """`model`: a language model whose head gives one number (`value_model`)."""

    def __init__(self, model: Any, config: Config, ranks: Ranks | None = None) -> None:
        settings = msgspec.structs.replace(
            config.trainer, learning_rate=config.algorithm.critic.learning_rate, schedule="constant", warmup_steps=0
        )
        super().__init__(model, config, settings, 1, "critic", ranks)
        self._clip = config.algorithm.critic.clip

    def values(self, samples: Sequence[Sample]) -> Tensor:
        """[A] float64, in the order of `samples`."""
        return self.read(samples, lambda _, logits: logits.read(_value), 1)[0]

    def update(self, samples: Sequence[Sample]) -> ValueUpdate:
        """Towards the `returns` of `samples`, not further than the clip from their `values`. The mean is over the
        tokens in the loss, of all ranks."""
        tokens = sum(sample.trained for sample in samples)

        def loss(pack: Pack, logits: Logits) -> tuple[Tensor, Tensor]:
            assert pack.values is not None and pack.returns is not None
            made = value_loss(logits.read(_value)[0].double(), pack.values, pack.returns, self._clip)
            part = torch.where(pack.loss, made.values, 0.0).sum() / max(tokens, 1)
            return part, torch.stack([part, made.clipped[pack.loss].sum()])

        total, clipped = self.minimise([sample for sample in samples if sample.trained], loss, figures=2)
        return ValueUpdate(total, clipped / max(tokens, 1), self.step().gradient_norm)


def _value(logits: Tensor) -> tuple[Tensor]:
    return (logits[:, 0],)


def value_model(model: Any) -> Any:
    """The language model `model` with a head of one number instead of the vocabulary; it begins at value 0."""
    weight = model.get_output_embeddings().weight
    head = torch.nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
    torch.nn.init.zeros_(head.weight)
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model
