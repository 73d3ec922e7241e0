"""A model over packed rows, and what is read from it: all that the roles of a step have in common."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_rl.config.schema import Config
from async_rl.services.trainer.logits import Logits, logits_of
from async_rl.services.trainer.packing import Pack, packs, share_of_packs
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.sequence import Spread, part_of
from async_rl.services.trainer.sharding import computing_device, gathered_no_more, prepare
from async_rl.services.trainer.sharing import share_prompts

Read = Callable[[Pack, Logits], Sequence[Tensor]]
"""Pack, its logits -> K columns [A]."""


class Network:
    """`model` with packed attention, in evaluation mode (no dropout)."""

    replays = False  # whether `model` takes the sampler's routing (services/trainer/routing.py)

    def __init__(self, model: Any, config: Config, ranks: Ranks | None = None) -> None:
        self.model = model
        self._ranks = ranks or Ranks()
        self._temperature = config.sampling.temperature
        self._capacity = config.trainer.micro_batch_tokens
        self._logits_bytes = config.trainer.logits_bytes
        dtype, cut = getattr(torch, config.model.dtype), config.trainer.tensor_parallel
        share_prompts(model, dtype, self._ranks.sequence, cut)
        prepare(model, config, self._ranks)
        self.device = computing_device(model, self._ranks)

    def logits(self, pack: Pack) -> Logits:
        """[A, V], where each action token of `pack` was sampled."""
        group = self._ranks.sequence
        row = pack if group is None else part_of(pack, group.rank(), group.size())
        inputs = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "expand": pack.expand,
            "collapse": pack.collapse,
            "cu_seq_lens_q": pack.cu_seq_lens,
            "cu_seq_lens_k": pack.cu_seq_lens,
            "max_length_q": pack.max_length,
            "max_length_k": pack.max_length,
            "use_cache": False,
        }
        if self.replays:
            inputs["routing"] = row.routing
        logits = logits_of(self.model, inputs, row.predict, self._logits_bytes)
        return logits if isinstance(row, Pack) else Spread(logits, row.own, len(pack.predict), group)

    def packs(self, samples: Sequence[Sample]) -> list[Pack]:
        """Those of `samples` that this rank passes, in as many micro-batches as every rank."""
        if self._ranks.shares == 1:
            return packs(samples, self._capacity)
        width = self.model.config.get_text_config().hidden_size
        return share_of_packs(samples, self._ranks.share, self._ranks.shares, self._capacity, width)

    @torch.no_grad()
    def read(self, samples: Sequence[Sample], what: Read, columns: int) -> Tensor:
        """[columns, A] float64 on the CPU: `what` of all `samples`, in their order. Each rank reads its share, all
        have the whole."""
        starts = torch.tensor([0, *[len(sample.action) for sample in samples]]).cumsum(0)
        found = torch.zeros(columns, int(starts[-1]), dtype=torch.float64)
        numbered = [replace(sample, number=number) for number, sample in enumerate(samples)]
        for pack in self.packs(numbered):
            pack = pack.to(self.device)
            made = torch.stack([column.double() for column in what(pack, self.logits(pack))]).cpu()
            if self._ranks.counts and not pack.idle:
                where = torch.cat([torch.arange(int(starts[n]), int(starts[n + 1])) for n in pack.numbers])
                found[:, where] = made
        gathered_no_more(self.model)
        return self._ranks.sum_(found)

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """[A] of the action tokens of `samples`, as Network.read."""
        return self.read(samples, lambda pack, logits: [self.of_tokens(pack, logits)[0]], 1)[0]

    def of_tokens(self, pack: Pack, logits: Logits, *, entropy_graph: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability [A] of each action token, with its graph, and the entropy [A], with one where asked for."""
        what = partial(token_logprobs, temperature=self._temperature, entropy_graph=entropy_graph)
        logprobs, entropy = logits.read(what, pack.targets, pack.survivors)
        return logprobs, entropy


def token_logprobs(
    logits: Tensor, targets: Tensor, survivors: Tensor | None, temperature: float, *, entropy_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [A] of `targets` [A] under `logits` [A, V] / temperature, and entropies [A] in nats.

    With `survivors` [A, k] (ids, -1 padded) both are of the distribution over those ids alone.
    """
    log_p, absent = _log_softmax(logits, survivors, temperature)
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p.masked_fill(absent, 0.0)).sum(-1) if absent is not None else _entropy(log_p)
    if survivors is None:
        return log_p.gather(1, targets[:, None])[:, 0], entropy
    z = _tempered(logits, temperature)
    kept = z.gather(1, survivors.clamp(min=0)).masked_fill(survivors < 0, -torch.inf)
    return z.gather(1, targets[:, None])[:, 0] - kept.logsumexp(dim=-1), entropy


def sum_pi_squared(logits: Tensor, survivors: Tensor | None, temperature: float) -> tuple[Tensor]:
    """[A] the sum of the squared probabilities, of the same distribution."""
    log_p, _ = _log_softmax(logits, survivors, temperature)
    return (torch.exp(2 * log_p).sum(dim=-1),)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    z = logits if logits.dtype == torch.float64 else logits.float()
    return z if temperature == 1.0 else z / temperature


def _log_softmax(logits: Tensor, survivors: Tensor | None, temperature: float) -> tuple[Tensor, Tensor | None]:
    """[A, V], or [A, k] over the survivors with what of that is padding."""
    z = _tempered(logits, temperature)
    if survivors is None:
        return torch.log_softmax(z, dim=-1), None
    absent = survivors < 0
    return torch.log_softmax(z.gather(1, survivors.clamp(min=0)).masked_fill(absent, -torch.inf), dim=-1), absent


def _entropy(log_p: Tensor) -> Tensor:
    dot: Tensor = torch.linalg.vecdot(log_p.exp(), log_p)
    return -dot
