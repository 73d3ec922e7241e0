"""A role that learns: a network, its optimizer, and what one optimizer update does to them."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.config.schema import Config, Trainer
from async_rl.errors import AsyncRLError
from async_rl.services.trainer.logits import Logits
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.packing import Pack
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.samples import Sample
from async_rl.services.trainer.schedule import learning_rate
from async_rl.services.trainer.tensor import partial_parameters

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a role's training stands, beside its tensors."""

    updates: int  # made, or skipped
    skipped_in_row: int


class Stepped(msgspec.Struct, frozen=True):
    """What an optimizer update came to."""

    gradient_norm: float  # before clipping
    learning_rate: float
    skipped: str | None  # why the weights were left as they were


class Trained(Network):
    """settings: of its optimizer. total: updates over the run, for the schedule. name: in messages."""

    def __init__(
        self, model: Any, config: Config, settings: Trainer, total: int, name: str, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, config, ranks)
        self.updates = 0
        self._settings, self._total, self._name = settings, total, name
        self._skipped_in_row = 0
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._partial = [] if self._ranks.tensor is None else partial_parameters(self.model)
        self._optimizer = _adamw(self._parameters, settings)

    def minimise(
        self, samples: Sequence[Sample], loss: Callable[[Pack, Logits], tuple[Tensor, Tensor]], figures: int
    ) -> list[float]:
        """Backward passes over `samples`, of which this rank takes its share: the gradient of the sum of `loss`, which
        gives for a micro-batch and its logits its part of the loss, and so many figures. The figures, summed over all
        ranks."""
        sums = torch.zeros(figures, dtype=torch.float64)
        for pack in self.packs(samples):
            pack = pack.to(self.device)
            logits = self.logits(pack)
            if pack.idle:
                part = 0 * logits.read(_some)[0].sum()
            else:
                part, of_pack = loss(pack, logits)
                if self._ranks.counts:
                    sums += of_pack.detach().to("cpu", torch.float64)
            part.backward()  # type: ignore[no-untyped-call]
        found: list[float] = self._ranks.sum_(sums).tolist()
        return found

    def step(self) -> Stepped:
        """One optimizer update with the gradients that are there.

        One that is not finite leaves weights and optimizer as they were; AsyncRLError after trainer.max_nonfinite of
        them in a row.
        """
        norm = self._norm()
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
                torch._foreach_mul_(self._gradients(), self._settings.max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._skipped_in_row += 1
            skipped = f"update {number} of the {self._name}: {self._nonfinite()}"
            log.warning("skipped %s", skipped)
        self._optimizer.zero_grad()
        if self._skipped_in_row >= self._settings.max_nonfinite:
            raise AsyncRLError(
                f"{self._skipped_in_row} updates in a row were not finite "
                f"(trainer.max_nonfinite = {self._settings.max_nonfinite}); the last, {skipped}"
            )
        return Stepped(norm, rate, skipped)

    def _gradients(self) -> list[Tensor]:
        """This rank's parts of them; zeros where there is none."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def _norm(self) -> float:
        """The global norm of the gradients, which are whole from here on."""
        gradients = self._gradients()
        if self._ranks.mesh is None:
            return float(torch.nn.utils.get_total_norm(gradients))
        for parameter in self._partial:
            self._ranks.sum_over_tensor_(local(parameter.grad))
        by_copies: dict[int, list[Tensor]] = {}
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            by_copies.setdefault(self._copies(parameter), []).append(gradient)
        squares = torch.zeros((), dtype=torch.float64)
        for copies, of in sorted(by_copies.items()):
            squares += torch.nn.utils.get_total_norm(of).to(squares) ** 2 / copies
        return math.sqrt(float(self._ranks.sum_(squares)))

    def _copies(self, parameter: Tensor) -> int:
        """Ranks that have the same part of it."""
        assert isinstance(parameter, DTensor)
        cuts = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return self._ranks.size // math.prod(size for size, placement in cuts if not placement.is_replicate())

    def _nonfinite(self) -> str:
        """Names the gradients that are not finite."""
        found = [not bool(torch.isfinite(gradient).all()) for gradient in self._gradients()]
        somewhere = self._ranks.sum_(torch.tensor(found, dtype=torch.int64)).tolist()
        learning = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        names = [name for name, ranks in zip(learning, somewhere, strict=True) if ranks]
        if not names:
            return "the norm of the gradient overflows"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"the gradient of {names[0]}{more} is not finite"

    # --- what a checkpoint keeps ---------------------------------------------------------------------

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
        """Continue where another one of these weights stood; KeyError where `tensors` are not of this model."""
        self.updates, self._skipped_in_row = progress.updates, progress.skipped_in_row
        parameters = dict(self.model.named_parameters())
        for name, value in tensors.items():
            owner, _, what = name.rpartition("/")
            self._optimizer.state[parameters[owner]][what] = value.to(local(parameters[owner]).device)


def _some(logits: Tensor) -> tuple[Tensor]:
    return (logits.sum(-1),)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """All of `tensor`; where ranks have parts of it, all of them ask at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_checksum(model: Any) -> str:
    """xxh3_64 over the name and the bytes of every tensor: equal for bit-equal weights alone, however they are spread
    over ranks, which ask at once."""
    digest = xxhash.xxh3_64()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(full(value.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _adamw(parameters: list[torch.nn.Parameter], settings: Trainer) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) do not."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:  # and those on other meshes apart: a fused update takes one mesh
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": of, "weight_decay": settings.weight_decay if matrices else 0.0}
            for (matrices, _), of in groups.items()
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
