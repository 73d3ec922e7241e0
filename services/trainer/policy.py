"""The policy: the model, its optimizer, and one optimizer update.

Log-probabilities are of log_softmax(z / T) with the temperature that the samples were drawn at, over the
survivors of top_p / top_k where the sampler stored them: an unchanged policy reads a ratio of 1.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from async_rl.algorithms.kl import Mismatch, mismatch
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.packing import Pack, packs
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.schedule import learning_rate, total_updates
from async_rl.services.trainer.sharing import share_prompts

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a policy's training stands, beside its tensors."""

    updates: int  # made, or skipped
    skipped_in_row: int


class Update(NamedTuple):
    """One optimizer update. Sums are over the loss tokens that needed a forward pass."""

    loss: float
    tokens: int
    entropy: float  # sum, nats
    clipped: int
    gradient_norm: float  # before clipping
    learning_rate: float
    mismatch: Mismatch  # behaviour against the policy as it was before this update
    skipped: str | None  # why the weights were left as they were


class Policy:
    """`model` is trained in place, with packed attention and in evaluation mode (no dropout)."""

    def __init__(self, model: Any, config: Config, ranks: Ranks | None = None) -> None:
        self.model = model
        self.updates = 0
        self._ranks = ranks or Ranks()
        self._settings = config.trainer
        self._temperature = config.sampling.temperature
        self._total = total_updates(config)
        self._skipped_in_row = 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = _adamw(self._parameters, config)
        share_prompts(model)

    def update(self, samples: Sequence[Sample], objective: Objective) -> Update:
        """One optimizer update with `samples`, of which this rank takes its share.

        An update whose gradient is not finite leaves weights and optimizer as they were; AsyncRLError after
        trainer.max_nonfinite of them in a row.
        """
        share = samples[self._ranks.rank :: self._ranks.size]
        totals = objective.totals(share, self._ranks)
        counts = torch.zeros(4, dtype=torch.float64)  # loss, tokens, entropy, clipped
        seen: list[Mismatch] = []
        for pack in packs([s for s in share if objective.needs_pass(s)], self._settings.micro_batch_tokens):
            pack = pack.to(self.model.device)
            logprobs, entropy = self.logprobs(pack)
            loss, token = objective.loss(pack, logprobs, totals)
            loss.backward()  # type: ignore[no-untyped-call]
            inside = pack.loss
            counts += torch.stack([loss.detach(), inside.sum(), entropy[inside].sum(), token.clipped[inside].sum()]).to(
                "cpu", torch.float64
            )
            seen.append(mismatch(logprobs[pack.finite], pack.behaviour[pack.finite], pack.lag[pack.finite]))
        norm = self._reduce_gradients()
        rate, skipped = self._step(norm)
        total_loss, tokens, entropy_sum, clipped = self._ranks.sum_(counts).tolist()
        return Update(
            loss=total_loss,
            tokens=int(tokens),
            entropy=entropy_sum,
            clipped=int(clipped),
            gradient_norm=norm,
            learning_rate=rate,
            mismatch=self._over_ranks(sum(seen, start=Mismatch.none())),
            skipped=skipped,
        )

    @property
    def progress(self) -> Progress:
        return Progress(self.updates, self._skipped_in_row)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as "parameter/what"; empty before the first update."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}/{what}": value
            for parameter, state in self._optimizer.state.items()
            for what, value in state.items()
        }

    def go_on(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Continue where another policy of these weights stood; KeyError where `tensors` are not of this model."""
        self.updates, self._skipped_in_row = progress.updates, progress.skipped_in_row
        parameters = dict(self.model.named_parameters())
        for name, value in tensors.items():
            owner, _, what = name.rpartition("/")
            self._optimizer.state[parameters[owner]][what] = value.to(parameters[owner].device)

    def logprobs(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probability [A] of each action token of `pack`, with its graph, and the entropy [A] without."""
        logits = self.model(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            expand=pack.expand,
            collapse=pack.collapse,
            cu_seq_lens_q=pack.cu_seq_lens,
            cu_seq_lens_k=pack.cu_seq_lens,
            max_length_q=pack.max_length,
            max_length_k=pack.max_length,
            use_cache=False,
            logits_to_keep=pack.predict,
        ).logits[0]
        return token_logprobs(logits, pack.targets, pack.survivors, self._temperature)

    def _reduce_gradients(self) -> float:
        """Gradients summed over the ranks; their global norm.

        A parameter without one gets zeros: another rank may have one.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._ranks.sum_(parameter.grad)
        return float(torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]))

    def _step(self, norm: float) -> tuple[float, str | None]:
        rate = learning_rate(self.updates, self._total, self._settings)
        number, self.updates = self.updates, self.updates + 1
        skipped = None
        if norm == 0.0:
            # Nothing to learn here. AdamW would go on in the direction of older batches, and the less gradient
            # comes, the longer its steps: one lucky sample and a few steps without any move a policy far.
            pass
        elif math.isfinite(norm):
            self._skipped_in_row = 0
            if norm > self._settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._settings.max_grad_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._skipped_in_row += 1
            skipped = f"update {number}: {self._nonfinite()}"
            log.warning("skipped %s", skipped)
        self._optimizer.zero_grad()
        if self._skipped_in_row >= self._settings.max_nonfinite:
            raise AsyncRLError(
                f"{self._skipped_in_row} updates in a row were not finite "
                f"(trainer.max_nonfinite = {self._settings.max_nonfinite}); the last, {skipped}"
            )
        return rate, skipped

    def _nonfinite(self) -> str:
        """Names the gradients that are not finite."""
        names = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        if not names:
            return "the norm of the gradient overflows"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"the gradient of {names[0]}{more} is not finite"

    def _over_ranks(self, own: Mismatch) -> Mismatch:
        if self._ranks.size == 1:
            return own
        extent = self._ranks.max_(torch.tensor([float(len(own.sums)), own.max_ratio], dtype=torch.float64))
        padded = (own + Mismatch(torch.zeros(int(extent[0]), 5, dtype=torch.float64), 0.0)).sums
        return Mismatch(self._ranks.sum_(padded), float(extent[1]))


def weights_checksum(model: Any) -> str:
    """xxh3_64 over the name and the bytes of every tensor: equal for bit-equal weights alone."""
    digest = xxhash.xxh3_64()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def token_logprobs(
    logits: Tensor, targets: Tensor, survivors: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [A] of `targets` [A] under `logits` [A, V] / temperature, and entropies [A] in nats.

    With `survivors` [A, k] (ids, -1 padded) both are of the distribution over those ids alone.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        z = z / temperature
    if survivors is None:
        log_p = torch.log_softmax(z, dim=-1)
        chosen = log_p.gather(1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
        return chosen, entropy
    absent = survivors < 0
    kept = z.gather(1, survivors.clamp(min=0)).masked_fill(absent, -torch.inf)
    chosen = z.gather(1, targets[:, None])[:, 0] - kept.logsumexp(dim=-1)
    with torch.no_grad():
        log_p = torch.log_softmax(kept, dim=-1)
        entropy = -(log_p.exp() * log_p.masked_fill(absent, 0.0)).sum(dim=-1)
    return chosen, entropy


def _adamw(parameters: list[torch.nn.Parameter], config: Config) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) do not."""
    settings = config.trainer
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
