"""The trajectories of a draw as the tensors that the update works on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.errors import InvariantError
from async_rl.services.trainer.masks import Masked
from async_rl.trajectory import Sequence as TokenSequence
from async_rl.trajectory import Trajectory


@dataclass(frozen=True)
class Sample:
    """One sequence of a trajectory, T tokens, A of them sampled."""

    tokens: Tensor  # [T] int64
    action: Tensor  # [A] int64, positions of the sampled tokens
    behaviour: Tensor  # [A] float32, log-probabilities as stored; 0 where they were not finite
    finite: Tensor  # [A] bool, where they were
    loss: Tensor  # [A] bool
    lag: Tensor  # [A] int64
    advantages: Tensor  # [A] float32
    survivors: Tensor | None = None  # [A, k] int64, ids kept by top_p / top_k, -1 padded
    routing: Tensor | None = None  # [T - 1, layers, k] int8 or int16, experts that the sampler's routers chose, or -1
    # what a step adds, where its algorithm asks for it
    old: Tensor | None = None  # [A] log-probabilities under the policy before the step's first update
    reference: Tensor | None = None  # [A] under the reference policy
    weights: Tensor | None = None  # [A] importance weights, made over the whole update
    chosen: Tensor | None = None  # [A] bool, the loss's choice, made over the whole update
    values: Tensor | None = None  # [A] the critic's, before the step
    returns: Tensor | None = None  # [A] what the critic learns
    outcome: float = 0.0  # the member's reward
    number: int = 0  # position in what is read, or trained, together

    @property
    def prompt(self) -> Tensor:
        """The tokens before the first sampled one."""
        return self.tokens[: self.action[0]]

    @property
    def own(self) -> Tensor:
        """The tokens from the first sampled one, without the last, which predicts nothing."""
        return self.tokens[self.action[0] : self.action[-1]]

    @property
    def prefix(self) -> bytes:
        """Equal for samples whose prompts the sampler computed alike: of the same tokens, through the same experts."""
        routed = b"" if self.routing is None else self.routing[: self.action[0]].numpy().tobytes()
        return self.prompt.numpy().tobytes() + routed

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return int(self.loss.sum())

    @property
    def carries(self) -> bool:
        """Whether any token in the loss has an advantage other than 0."""
        return bool((self.advantages[self.loss] != 0).any())


def samples_of(trajectory: Trajectory, mask: Masked, outcome: float = 0.0) -> list[Sample]:
    """One for each of its sequences, under its loss mask; their advantages are 0 so far."""
    ends = np.cumsum([sequence.actions for sequence in trajectory.sequences])[:-1]
    parts = zip(trajectory.sequences, np.split(mask.loss, ends), np.split(mask.lag, ends), strict=True)
    return [_sample(sequence, loss, lag, outcome) for sequence, loss, lag in parts]


def _sample(sequence: TokenSequence, loss: np.ndarray, lag: np.ndarray, outcome: float) -> Sample:
    positions = np.flatnonzero(sequence.action)
    if positions[0] == 0:
        raise InvariantError("the first token of a trajectory is an action: nothing predicts it")
    behaviour = sequence.logprobs[positions].astype(np.float32)
    finite = np.isfinite(behaviour)
    return Sample(
        tokens=torch.tensor(sequence.tokens, dtype=torch.int64),
        action=torch.tensor(positions, dtype=torch.int64),
        behaviour=torch.tensor(np.where(finite, behaviour, 0.0), dtype=torch.float32),
        finite=torch.tensor(finite),
        loss=torch.tensor(loss),
        lag=torch.tensor(lag),
        advantages=torch.zeros(len(positions)),
        survivors=_survivors(sequence, positions),
        routing=None if sequence.routing is None else torch.tensor(sequence.routing),
        outcome=outcome,
    )


def with_columns(samples: Sequence[Sample], columns: dict[str, Tensor]) -> list[Sample]:
    """`samples` with columns of these names; a column is [A], the action tokens of all samples in their order."""
    lengths = [len(sample.action) for sample in samples]
    parts = {name: torch.split(values, lengths) for name, values in columns.items()}
    own: list[dict[str, Any]] = [{name: part[k] for name, part in parts.items()} for k in range(len(samples))]
    return [replace(sample, **given) for sample, given in zip(samples, own, strict=True)]


def _survivors(sequence: TokenSequence, positions: np.ndarray) -> Tensor | None:
    kept = sequence.survivors
    if kept is None:
        return None
    sampled = sequence.tokens[positions]
    if kept.shape[0] != len(positions) or not (kept == sampled[:, None]).any(axis=1).all():
        raise InvariantError("a sampled token is not among the survivors of top_p / top_k stored for it")
    return torch.tensor(kept, dtype=torch.int64)
