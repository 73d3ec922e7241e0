"""One token for each row of logits, its log-probability that of the distribution really sampled from. Pure.

Each row has its own temperature, truncation and uniform number, so evaluation runs beside training and what a
request samples does not depend on its neighbours in the batch.
"""

from typing import NamedTuple

import torch

from async_rl.config.schema import Sampling

MASS_ROUNDING = 1e-6  # of probability: top_p = 0.9 over (.6, .3, .1) is two tokens, whatever floats make of it


class Row(NamedTuple):
    """How one row is sampled; `uniform` in [0, 1) decides which token it is."""

    sampling: Sampling
    greedy: bool
    uniform: float


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    survivors: list[list[int] | None]  # ids in descending probability where the row is truncated


def sample(logits: torch.Tensor, rows: list[Row]) -> Sampled:
    """One token for each row of logits [B, V] float32.

    Sampled rows: log-probabilities of log_softmax(z / temperature), renormalised over what top_k, then top_p,
    keep. Greedy rows: the most probable token, log-probability at temperature 1.
    """
    scaled = _scale(logits, rows)
    survivors: list[list[int] | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if not row.greedy and truncates(row.sampling):
            kept = _kept(scaled[i], row.sampling)
            scaled = scaled.clone() if scaled is logits else scaled
            scaled[i] = torch.full_like(scaled[i], -torch.inf).index_copy_(0, kept, scaled[i, kept])
            survivors[i] = kept.tolist()
    logprobs = scaled.log_softmax(-1)
    tokens = _invert(logprobs, [row.uniform for row in rows])
    if any(row.greedy for row in rows):
        greedy = torch.tensor([row.greedy for row in rows], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return Sampled(tokens.tolist(), chosen.tolist(), survivors)


def truncates(sampling: Sampling) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0


def _scale(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    temperatures = [1.0 if row.greedy else row.sampling.temperature for row in rows]
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits / torch.tensor(temperatures, device=logits.device)[:, None]


def _kept(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Ids that survive truncation of one row [V], most probable first; at least one."""
    ordered, ids = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[: sampling.top_k], ids[: sampling.top_k]
    probabilities = ordered.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    count = int((before < sampling.top_p - MASS_ROUNDING).sum())
    return ids[: max(count, 1)]


def _invert(logprobs: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """[B]: the first id whose cumulative probability exceeds the row's uniform number."""
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise ValueError("logits are not finite: the weights of this version are broken")
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None] * total
    # A product rounded up to the total itself would fall behind the last possible token.
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]
