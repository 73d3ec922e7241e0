"""Aggregation: the weight of each token's loss in the sum that is differentiated.

The denominators are totals over one optimizer update, all micro-batches and all ranks. So the gradient of an
update is the sum of its parts' gradients, however it is cut. Masked tokens are in neither numerator nor
denominator, and a trajectory whose tokens are all masked is no trajectory of the mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Totals(NamedTuple):
    """Of one optimizer update, over all ranks."""

    tokens: int  # in the loss
    sequences: int  # with at least one token in the loss


def token_mean(loss: Tensor, sequence: Tensor, sequences: int, totals: Totals, horizon: int) -> Tensor:
    """1 / tokens: every token weighs the same (DAPO, Yu et al. 2025)."""
    return loss / max(totals.tokens, 1)


def token_sum(loss: Tensor, sequence: Tensor, sequences: int, totals: Totals, horizon: int) -> Tensor:
    """1: the plain sum."""
    return loss


def seq_mean_token_sum(loss: Tensor, sequence: Tensor, sequences: int, totals: Totals, horizon: int) -> Tensor:
    """1 / sequences: the mean over trajectories of their summed loss."""
    return loss / max(totals.sequences, 1)


def seq_mean_token_mean(loss: Tensor, sequence: Tensor, sequences: int, totals: Totals, horizon: int) -> Tensor:
    """1 / (sequences x own tokens): every trajectory weighs the same (GRPO, Shao et al. 2024)."""
    own = torch.zeros(sequences, dtype=loss.dtype, device=loss.device).index_add_(0, sequence, loss)
    return loss / (max(totals.sequences, 1) * own.clamp(min=1)[sequence])


def seq_mean_token_sum_norm(loss: Tensor, sequence: Tensor, sequences: int, totals: Totals, horizon: int) -> Tensor:
    """1 / (sequences x horizon): a fixed length instead of the own one (Dr. GRPO, Liu et al. 2025)."""
    return loss / (max(totals.sequences, 1) * horizon)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of values x weights; a value of weight 0 adds nothing, even where it is NaN."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
