"""Corrections for tokens that another policy than the newest one sampled.

log_r [A] is the log ratio of the importance weights, within +-20: log pi_old - log pi_behaviour where the proximal
policy is its own, else log pi - log pi_behaviour; never a gradient. Functions that say "of the whole update" must
get all of its tokens at once.
"""

import torch
from torch import Tensor

from async_rl.config.algorithms import M2PO, OPSM, Reject, Rejection, Weights

MAX_LOG_RATIO = 20.0


def importance_weights(log_r: Tensor, loss: Tensor, sequence: Tensor, sequences: int, settings: Weights) -> Tensor:
    """[A] r of the token, or of its sequence (the product over its tokens in the loss), at most `cap` (truncated
    importance sampling, Ionides 2008), or 0 outside `band` (IcePop, masked importance sampling).

    `normalize` divides by the mean over the tokens in the loss, or over the sequences, of the whole update.
    """
    if settings.level == "sequence":
        sums = _per_sequence(torch.where(loss, log_r, 0.0), sequence, sequences)
        log_r = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence]
    weights = log_r.exp()
    if settings.band is not None:
        low, high = settings.band
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    elif settings.cap is not None:
        weights = weights.clamp(max=settings.cap)
    if not settings.normalize:
        return weights
    inside = loss.to(weights.dtype)
    if settings.level == "sequence":  # each sequence once
        tokens = _per_sequence(inside, sequence, sequences)
        inside = inside / tokens.clamp(min=1)[sequence]
    mean = (weights * inside).sum() / inside.sum().clamp(min=1)
    return weights / mean if mean > 1e-8 else weights


def rejected(
    log_r: Tensor, advantages: Tensor, loss: Tensor, sequence: Tensor, sequences: int, settings: Rejection
) -> Tensor:
    """[A] bool: the tokens that leave the loss. Statistics are over the tokens in it."""
    match settings:
        case Reject():
            return _out_of_bounds(log_r, loss, sequence, sequences, settings)
        case M2PO():
            return _m2po(log_r, loss, settings.tau)
        case OPSM():
            return _opsm(log_r, advantages, loss, sequence, sequences, settings.delta)


def divergence(log_r: Tensor, kind: str) -> Tensor:
    """[A] k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman 2020)."""
    match kind:
        case "k1":
            return -log_r
        case "k2":
            return 0.5 * log_r**2
        case _:
            return log_r.expm1() - log_r


def _out_of_bounds(log_r: Tensor, loss: Tensor, sequence: Tensor, sequences: int, settings: Reject) -> Tensor:
    level, _, kind = settings.by.rpartition("_")
    values = divergence(log_r, kind)
    if level != "token":
        inside = torch.where(loss, values, 0.0)
        if level == "seq_max":
            least = torch.full((sequences,), -torch.inf, dtype=values.dtype, device=values.device)
            whole = least.scatter_reduce(0, sequence, torch.where(loss, values, -torch.inf), "amax")
        else:
            whole = _per_sequence(inside, sequence, sequences)
        if level == "seq_mean":
            whole = whole / _per_sequence(loss.to(values.dtype), sequence, sequences).clamp(min=1)
        values = whole[sequence]
    out = values > settings.max
    return out if settings.min is None else out | (values < settings.min)


def _m2po(log_r: Tensor, loss: Tensor, tau: float) -> Tensor:
    """The tokens of the largest (log r)^2 of the whole update, as few as bring the mean of the others to tau
    (Zheng et al. 2025, arXiv:2510.01161)."""
    squares, order = torch.where(loss, log_r.double() ** 2, torch.inf).sort(stable=True)
    count = torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.zeros_like(loss)
    kept[order] = squares.cumsum(0) / count <= tau
    return loss & ~kept


def _opsm(log_r: Tensor, advantages: Tensor, loss: Tensor, sequence: Tensor, sequences: int, delta: float) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2 2025): sequences of negative advantage whose mean k1 is above
    delta."""
    tokens = _per_sequence(loss.to(log_r.dtype), sequence, sequences).clamp(min=1)
    kl = _per_sequence(torch.where(loss, -log_r, 0.0), sequence, sequences) / tokens
    worth = _per_sequence(torch.where(loss, advantages, 0.0), sequence, sequences)
    return ((worth < 0) & (kl > delta))[sequence]


def loglinear_old(behaviour: Tensor, logprobs: Tensor, versions: Tensor, version: int) -> Tensor:
    """[A] sg[beh + a (lp - beh)], a = (v - v_beh) / (v + 1 - v_beh): where the policy of `version` v, which the step
    begins with, would stand if log-probabilities went in a line from the version v_beh [A] that sampled to the v + 1
    that the step makes. No pass is needed for it (A-3PO, 2025)."""
    lag = (version - versions).to(behaviour.dtype)
    return (behaviour + lag / (lag + 1) * (logprobs - behaviour)).detach()


def _per_sequence(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    return torch.zeros(sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)
