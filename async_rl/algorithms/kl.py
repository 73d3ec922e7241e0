"""KL divergences: the trainer from the sampler, before anything is truncated, and the policy from a reference.

With tokens sampled from the behaviour policy and log r = lp - beh, KL(behaviour || trainer) is estimated by
the means of k1 = -log r and k3 = r - 1 - log r (Schulman 2020, "Approximating KL divergence"): k1 unbiased
and noisy, k3 unbiased and never negative.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.algorithms.losses import log_ratio
from async_rl.config.algorithms import KL


@dataclass(frozen=True)
class Mismatch:
    """Sums over tokens, by lag: parts of a batch add up. L is one more than the largest lag."""

    sums: Tensor  # [L, 5] float64: tokens, k1, k3, ratio, ratio squared
    max_ratio: float

    @classmethod
    def none(cls) -> "Mismatch":
        return cls(torch.zeros(0, 5, dtype=torch.float64), 0.0)

    def __add__(self, other: "Mismatch") -> "Mismatch":
        size = max(len(self.sums), len(other.sums))
        both = [torch.nn.functional.pad(m.sums, (0, 0, 0, size - len(m.sums))) for m in (self, other)]
        return Mismatch(both[0] + both[1], max(self.max_ratio, other.max_ratio))

    @property
    def tokens(self) -> int:
        return int(self.sums[:, 0].sum())

    @property
    def k1(self) -> float:
        return self._mean(1)

    @property
    def k3(self) -> float:
        return self._mean(2)

    @property
    def mean_ratio(self) -> float:
        return self._mean(3)

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / (n sum w^2) with w = r: 1 where all are equal, 1/n where one is everything."""
        tokens, _, _, first, second = self.sums.sum(dim=0).tolist()
        return float(first**2 / (tokens * second)) if second else float("nan")

    def by_lag(self) -> dict[int, tuple[float, float]]:
        """lag -> (k1, k3), for lags that occur."""
        return {lag: (row[1] / row[0], row[2] / row[0]) for lag, row in enumerate(self.sums.tolist()) if row[0]}

    def _mean(self, column: int) -> float:
        total = self.sums.sum(dim=0)
        return float(total[column] / total[0]) if total[0] else float("nan")


def k1(log_ratios: Tensor) -> Tensor:
    return -log_ratios


def k3(log_ratios: Tensor) -> Tensor:
    return log_ratios.expm1() - log_ratios


def mismatch(logprobs: Tensor, behaviour: Tensor, lag: Tensor) -> Mismatch:
    """Of [A] tokens with finite behaviour log-probabilities; `lag` [A] int64, not negative."""
    log_r = log_ratio(logprobs.detach().double(), behaviour.double()).cpu()
    ratio = log_r.exp()
    rows = torch.stack([torch.ones_like(log_r), k1(log_r), k3(log_r), ratio, ratio**2], dim=1)
    size = int(lag.max()) + 1 if lag.numel() else 0
    sums = torch.zeros(size, 5, dtype=torch.float64).index_add_(0, lag.cpu(), rows)
    return Mismatch(sums, float(ratio.max()) if ratio.numel() else 0.0)


def penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """[A] of KL(policy || reference) at sampled tokens, with d = lp - ref within +-20: k1 = d, abs = abs(d),
    k2 = d^2 / 2, k3 = exp(-d) - 1 + d, at most 10 (Schulman 2020).

    A name with + has that one's value and the gradient of k2, which is the only one whose expected gradient is that
    of the KL.
    """
    d = log_ratio(logprobs, reference)
    if estimator.endswith("+"):
        square = 0.5 * d**2
        return square - square.detach() + penalty(logprobs, reference, estimator[:-1]).detach()
    match estimator:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return 0.5 * d**2
        case "k3":
            return k3(-d).clamp(max=10.0)
    raise ValueError(f"no KL estimator is called {estimator!r}")


def adapted(coefficient: float, kl: float, trajectories: int, settings: KL) -> float:
    """The coefficient after a step whose mean KL was `kl`: raised where that is above the target, by at most
    0.2 x trajectories / horizon (Ziegler et al. 2019, arXiv:1909.08593). Without a target it stays."""
    if settings.target is None:
        return coefficient
    error = min(max(kl / settings.target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * trajectories / settings.horizon)
