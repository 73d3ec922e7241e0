"""The ranks of a trainer: processes that share its weights and its batch, and do the same at the same time. Whatever is
a total of a step goes through here, so that the code reads the same on one rank, where these are the identity, and on
many."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from async_rl.config.schema import Trainer
from async_rl.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

dist: Any = torch.distributed  # whose stubs leave out what is used here
DATA, SEQUENCE, TENSOR = "data", "sequence", "tensor"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True)
class Ranks:
    """mesh: [data, sequence, tensor] of all ranks; those that differ in `data` pass other micro-batches. None: one
    rank, whose models are whole."""

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None

    @property
    def shares(self) -> int:
        """Parts of a batch that are passed at the same time."""
        return 1 if self.mesh is None else self.mesh[DATA].size()

    @property
    def share(self) -> int:
        """Which of them this rank passes."""
        return 0 if self.mesh is None else self.mesh[DATA].get_local_rank()

    @property
    def sequence(self) -> "ProcessGroup | None":
        """Those that share each sequence; None: every rank has whole ones."""
        return None if self.mesh is None or self.mesh[SEQUENCE].size() == 1 else self.mesh[SEQUENCE].get_group()

    @property
    def counts(self) -> bool:
        """Whether what this rank finds goes into a total: of those that pass the same one does."""
        return self.mesh is None or not (self.mesh[SEQUENCE].get_local_rank() or self.mesh[TENSOR].get_local_rank())

    @property
    def tensor(self) -> "DeviceMesh | None":
        """Those that share each matrix; None: every rank's layers are whole."""
        return None if self.mesh is None or self.mesh[TENSOR].size() == 1 else self.mesh[TENSOR]

    def sum_(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def sum_over_tensor_(self, values: Tensor) -> None:
        """`values` summed over those that share each matrix, in place."""
        if self.tensor is not None:
            dist.all_reduce(values, group=self.tensor.get_group())

    def max_(self, values: Tensor) -> Tensor:
        """The largest of each of `values` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def sharded(settings: Trainer) -> bool:
    """Whether FSDP2 holds the models of such a trainer; else one process has them whole."""
    return settings.ranks > 1 or settings.dtype is not None or settings.offload


def join(settings: Trainer, rank: int, store: Any = None) -> Ranks:
    """The ranks of a trainer with `settings`, of which this process is number `rank`; once in a process. All come to
    the `store` within trainer.collective_s."""
    if not sharded(settings):
        return Ranks()
    device = torch.device(settings.device)
    if device.type not in BACKENDS:
        raise UserError(f"trainer.device = '{device}': ranks talk on {', '.join(sorted(BACKENDS))}, not on it")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.HashStore() if store is None else store,
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.collective_s),
    )
    inner = settings.sequence_parallel, settings.tensor_parallel
    shape, names = (settings.ranks // (inner[0] * inner[1]), *inner), (DATA, SEQUENCE, TENSOR)
    return Ranks(rank, settings.ranks, dist.init_device_mesh(device.type, shape, mesh_dim_names=names))
