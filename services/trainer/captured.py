"""What a checkpoint is made of, as copies in the host's memory: training may go on while they are written.

Every rank has its own parts of the optimizers and of the models beside the policy; torch.distributed.checkpoint writes
them, and reads them on any number of ranks. Of the policy rank 0 has the whole, as a folder for other programs.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from async_rl.errors import AsyncRLError
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.trained import Progress, Trained, full

RANDOM = "random"


@dataclass(frozen=True)
class Captured:
    policy: dict[str, Tensor]  # on rank 0: what a publication has, too, whole; on the others nothing of each
    parts: dict[str, Tensor]  # this rank's: "policy.optimizer/NAME/exp_avg", "critic/NAME", ...
    progress: dict[str, Progress]
    kl: float
    weights: str  # checksum of the policy's


def capture(roles: Roles, tensors: dict[str, Tensor], weights: str, ranks: Ranks) -> Captured:
    """On every rank at once. tensors: of the policy, that the folder for other programs gets."""
    policy: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # tied tensors stay one
    for name, value in tensors.items():
        if id(value) not in copies:
            whole = full(value.detach())
            copies[id(value)] = _copy(whole) if ranks.rank == 0 else torch.empty(0)
        policy[name] = copies[id(value)]
    learners = {"policy": roles.policy, **roles.beside()}
    parts = {RANDOM: torch.get_rng_state()}
    for name, value in _parts(roles):
        parts[name] = _copy(value)
    progress = {name: learner.progress for name, learner in learners.items()}
    return Captured(policy, parts, progress, roles.kl, weights)


def write(parts: dict[str, Tensor], folder: Path, group: Any) -> None:
    """On every rank at once. group: of their own; None for one rank. AsyncRLError where one could not write."""
    writer = FileSystemWriter(folder, sync_files=True)
    try:
        with _without_advice():
            save(parts, storage_writer=writer, process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError, OSError) as error:
        raise AsyncRLError(f"{folder}: {_reason(error)}") from None


def read(roles: Roles, progress: dict[str, Progress], folder: Path, *, beside: bool) -> None:
    """Into `roles`, whose policy has its weights already, on any ranks. beside: the other roles, too."""
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    learners: dict[str, Trained] = {"policy": roles.policy, **(roles.beside() if beside else {})}
    wanted: dict[str, Any] = {RANDOM: torch.empty_like(torch.get_rng_state())}
    states: dict[str, dict[str, Tensor]] = {}
    for name, learner in learners.items():
        states[name] = _empty_states(learner, known, f"{name}.optimizer/")
        wanted |= {f"{name}.optimizer/{key}": value for key, value in states[name].items()}
        if learner is not roles.policy:
            wanted |= {f"{name}/{key}": value for key, value in learner.model.state_dict().items()}
    try:
        with _without_advice():
            load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise AsyncRLError(f"{folder}: {_reason(error)}") from None
    torch.set_rng_state(wanted[RANDOM])
    for name, learner in learners.items():
        learner.go_on(progress[name], states[name])


def checksums(folder: Path) -> dict[str, str]:
    """xxh3_64 of each file that `write` has made in `folder`."""
    return {path.name: _checksum(path) for path in sorted(folder.iterdir()) if path.suffix != ".json"}


def require_undamaged(folder: Path, known: dict[str, str]) -> None:
    """AsyncRLError with the first file that is not as it was written."""
    for name, checksum in known.items():
        if not (folder / name).is_file() or _checksum(folder / name) != checksum:
            raise AsyncRLError(f"{folder / name} is not what was written")


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """On one process saving is for one process, as torch never fails to say."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _parts(roles: Roles) -> Iterator[tuple[str, Tensor]]:
    for name, role in {"policy": roles.policy, **roles.beside()}.items():
        for key, value in role.optimizer_tensors().items():
            yield f"{name}.optimizer/{key}", value
        if role is not roles.policy:
            for key, value in role.model.state_dict().items():
                yield f"{name}/{key}", value


def _empty_states(learner: Trained, known: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """For what the optimizer of `learner` had, laid out as its parameters are here."""
    parameters = dict(learner.model.named_parameters())
    found: dict[str, Tensor] = {}
    for name, about in known.items():
        if not name.startswith(prefix) or not isinstance(about, TensorStorageMetadata):
            continue
        key = name.removeprefix(prefix)
        parameter = parameters[key.rpartition("/")[0]]
        like, dtype = parameter.shape == about.size, about.properties.dtype
        found[key] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(about.size, dtype=dtype)
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as opened:
        while chunk := opened.read(1 << 24):
            digest.update(chunk)
    return str(digest.hexdigest())


def _reason(error: BaseException) -> str:
    """The first failure of a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
