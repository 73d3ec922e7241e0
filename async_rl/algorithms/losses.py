"""Policy losses: one value for each action token, before aggregation, mask and importance weights.

lp carries the gradient, old is what the ratio is taken against (the correction decides which), A the advantage;
d = lp - old within +-20, rho = exp(d), sg stops the gradient. Sequence ratios are over all action tokens.
"""

import torch
from torch import Tensor

from async_rl.algorithms.members import TokenLoss, Tokens
from async_rl.config.algorithms import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    TOPR,
    ClipCov,
    KLCov,
    Reinforce,
)

MAX_LOG_RATIO = 20.0
MAX_SEQUENCE_LOG_RATIO = 10.0


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """[A] lp - old clamped to +-20, so that its exponential stays finite."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo(tokens: Tokens, settings: PPO) -> TokenLoss:
    """[A] max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0 at most -dual_clip A.

    Schulman et al. 2017 (arXiv:1707.06347); two bounds: Yu et al. 2025 (DAPO, arXiv:2503.14476); the dual clip:
    Ye et al. 2019 (arXiv:1912.09729).
    """
    advantages = tokens.advantages
    plain, bounded = _surrogates(log_ratio(tokens.logprobs, tokens.old).exp(), advantages, settings)
    pessimistic = torch.maximum(plain, bounded)
    ceiling = -settings.dual_clip * advantages
    values = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    clipped = (bounded > plain) | ((advantages < 0) & (pessimistic > ceiling))
    return TokenLoss(values, clipped.detach())


def dppo_tv(tokens: Tokens, settings: DPPOTV) -> TokenLoss:
    """[A] -A sg[min(rho, max_ratio)] lp; 0 where pi - pi_old > delta_high (A > 0) or < -delta_low (A <= 0).

    arXiv:2602.04879: the total variation of the token's own probability is bounded, not its ratio, which clips rare
    tokens too early and frequent ones too late.
    """
    moved = (tokens.logprobs.exp() - tokens.old.exp()).detach()
    valid = torch.where(tokens.advantages > 0, moved <= settings.delta_high, moved >= -settings.delta_low)
    return _trusted(tokens, valid, settings.max_ratio)


def dppo_kl(tokens: Tokens, settings: DPPOKL) -> TokenLoss:
    """[A] as dppo_tv, kept where KL(pi_old, pi) of "this token or another" is at most delta, or pi moves back towards
    pi_old (arXiv:2602.04879)."""
    now, old = tokens.logprobs.detach().exp(), tokens.old.exp()
    kl = old * (tokens.old - tokens.logprobs.detach()) + (1 - old) * ((1 - old + 1e-8) / (1 - now + 1e-8)).log()
    risen = (kl <= settings.delta_high) | (now <= old)
    fallen = (kl <= settings.delta_low) | (now >= old)
    return _trusted(tokens, torch.where(tokens.advantages > 0, risen, fallen), settings.max_ratio)


def _trusted(tokens: Tokens, valid: Tensor, max_ratio: float) -> TokenLoss:
    ratio = log_ratio(tokens.logprobs, tokens.old).exp().clamp(max=max_ratio).detach()
    return TokenLoss(-tokens.advantages * ratio * tokens.logprobs * valid, ~valid)


def gspo(tokens: Tokens, settings: GSPO) -> TokenLoss:
    """[A] PPO's clip on s pi / sg[pi], s = exp(mean of d over the sequence) (Zheng et al. 2025, arXiv:2507.18071).

    The gradient of each token is that of the sequence's ratio, so one clip takes or leaves the whole answer.
    """
    d = tokens.logprobs - tokens.old
    own = tokens.logprobs - tokens.logprobs.detach()
    ratio = (own + _mean(d.detach(), tokens)[tokens.sequence]).clamp(-MAX_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    plain, bounded = _surrogates(ratio, tokens.advantages, settings)
    return TokenLoss(torch.maximum(plain, bounded), (bounded > plain).detach())


def sapo(tokens: Tokens, settings: SAPO) -> TokenLoss:
    """[A] -A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A (Gao et al. 2025, arXiv:2511.20347)."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    tau = torch.where(tokens.advantages > 0, settings.tau_positive, settings.tau_negative).to(ratio.dtype)
    return _unclipped(-tokens.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


def reinforce(tokens: Tokens, settings: Reinforce) -> TokenLoss:
    """[A] -A lp (Williams 1992); with the estimator `gpg`, GPG (Chu et al. 2025, arXiv:2504.02546)."""
    return _unclipped(-tokens.advantages * tokens.logprobs)


def clip_cov(tokens: Tokens, settings: ClipCov) -> TokenLoss:
    """[A] PPO's clip without the dual one; 0 on the tokens of `choose_clip_cov` (Cui et al. 2025, arXiv:2505.22617)."""
    plain, bounded = _surrogates(log_ratio(tokens.logprobs, tokens.old).exp(), tokens.advantages, settings)
    chosen = _chosen(tokens)
    values = torch.where(chosen, 0.0, torch.maximum(plain, bounded))
    return TokenLoss(values, ((bounded > plain) | chosen).detach())


def choose_clip_cov(tokens: Tokens, settings: ClipCov, noise: Tensor) -> Tensor:
    """[A] bool: max(floor(share N), 1) random ones of the unclipped tokens in the loss, N in number, whose
    covariance (A - mean A)(lp - mean lp) lies between low and high: the tokens that cost most entropy."""
    plain, bounded = _surrogates(log_ratio(tokens.logprobs, tokens.old).exp(), tokens.advantages, settings)
    cov = _covariance(tokens)
    fit = tokens.loss & (bounded <= plain) & (cov > settings.low) & (cov < settings.high)
    return _first(torch.where(fit, noise.to(cov.dtype), torch.inf), fit, _share(tokens, settings.share))


def kl_cov(tokens: Tokens, settings: KLCov) -> TokenLoss:
    """[A] -A rho; on the tokens of `choose_kl_cov` plus beta abs(d) (Cui et al. 2025, arXiv:2505.22617)."""
    d = log_ratio(tokens.logprobs, tokens.old)
    return _unclipped(-tokens.advantages * d.exp() + torch.where(_chosen(tokens), settings.beta * d.abs(), 0.0))


def choose_kl_cov(tokens: Tokens, settings: KLCov, noise: Tensor) -> Tensor:
    """[A] bool: max(floor(share N), 1) tokens in the loss of the highest covariance; nothing is random in it."""
    cov = _covariance(tokens)
    return _first(torch.where(tokens.loss, -cov, torch.inf), tokens.loss, _share(tokens, settings.share))


def gmpo(tokens: Tokens, settings: GMPO) -> TokenLoss:
    """[A] -A exp(mean over the sequence of sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)))
    (Zhao et al. 2025, arXiv:2507.20673). With `seq-mean-token-mean` the sequence's mean advantage times its ratio."""
    d, sign = log_ratio(tokens.logprobs, tokens.old), tokens.advantages.sign()
    bounded = d.clamp(-settings.clip_low, settings.clip_high)
    pessimistic = sign * torch.minimum(sign * d, sign * bounded)
    ratio = _mean(pessimistic, tokens).exp()[tokens.sequence]
    return TokenLoss(-tokens.advantages * ratio, (sign * bounded < sign * d).detach())


def dro(tokens: Tokens, settings: DRO) -> TokenLoss:
    """[A] -(A lp - (beta / 2) d^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    d = log_ratio(tokens.logprobs, tokens.old)
    return _unclipped(-(tokens.advantages * tokens.logprobs - 0.5 * settings.beta * d**2))


def cispo(tokens: Tokens, settings: CISPO) -> TokenLoss:
    """[A] -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A lp (MiniMax 2025, arXiv:2506.13585). `clipped`: where the
    weight was; the gradient stays."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp().detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def topr(tokens: Tokens, settings: TOPR) -> TokenLoss:
    """[A] A > 0: -A lp; else -sg[clip(s, 0, 1)] A lp, s = exp(sum of lp - beh over the sequence): what was wrong is
    pushed down only as far as it is still likely (Le Roux et al. 2025, arXiv:2503.14286)."""
    sums = _sum((tokens.logprobs - tokens.behaviour).detach(), tokens)[tokens.sequence]
    weight = torch.where(tokens.advantages > 0, 1.0, sums.clamp(-MAX_LOG_RATIO, 0.0).exp())
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, (tokens.advantages <= 0) & (sums > 0))


# --- what they share ---------------------------------------------------------------------------------


def _surrogates(ratio: Tensor, advantages: Tensor, settings: PPO | GSPO | ClipCov) -> tuple[Tensor, Tensor]:
    """PPO's loss with the ratio as it is, and within its bounds."""
    return -advantages * ratio, -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def _unclipped(values: Tensor) -> TokenLoss:
    return TokenLoss(values, torch.zeros_like(values, dtype=torch.bool))


def _sum(values: Tensor, tokens: Tokens) -> Tensor:
    """[S]"""
    empty = torch.zeros(tokens.sequences, dtype=values.dtype, device=values.device)
    return empty.index_add(0, tokens.sequence, values)


def _mean(values: Tensor, tokens: Tokens) -> Tensor:
    """[S]"""
    return _sum(values, tokens) / _sum(torch.ones_like(values), tokens).clamp(min=1)


def _covariance(tokens: Tokens) -> Tensor:
    """[A] (A - mean A)(lp - mean lp), means over the tokens in the loss."""
    count = tokens.loss.sum().clamp(min=1)
    advantages, lp = tokens.advantages, tokens.logprobs.detach()
    centred = [v - torch.where(tokens.loss, v, 0.0).sum() / count for v in (advantages, lp)]
    return centred[0] * centred[1]


def _share(tokens: Tokens, share: float) -> int:
    return max(int(share * int(tokens.loss.sum())), 1)


def _first(order: Tensor, fit: Tensor, count: int) -> Tensor:
    """[A] bool: the `count` tokens of `fit` that come first by `order`."""
    chosen = torch.zeros_like(fit)
    chosen[order.argsort(stable=True)[:count]] = True
    return chosen & fit


def _chosen(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.loss) if tokens.chosen is None else tokens.chosen
