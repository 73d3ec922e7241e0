"""Estimates made from scored samples. Pure."""

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` samples is right, from `correct` of `samples`.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021. `k` is at most `samples`.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} right in {samples} samples is not defined")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
