"""Checkpoints: folders that plain transformers loads, complete or absent, with all that a run goes on from.

checkpoints/step-00000040/                  config, safetensors, tokenizer after 40 steps; with model.lora the
                                            adapter, as peft loads it, in place of the model
checkpoints/step-00000040/trainer/          state.json; the optimizers and the roles that learn beside the policy, as
                                            torch.distributed.checkpoint has them: any number of ranks goes on from it
checkpoints/latest                          the name of the newest
checkpoints/damaged-step-00000040/          one that could not be read again
"""

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from torch.distributed import new_group

from async_rl.config.load import parse
from async_rl.config.resume import require_same_run
from async_rl.config.schema import Config, Model
from async_rl.errors import AsyncRLError, ConfigError, DeadlineExceeded, UserError
from async_rl.models.load import load_tokenizer
from async_rl.protocol.buffer import Cursor
from async_rl.rundir import make_durable, write_atomically
from async_rl.services.trainer import lora
from async_rl.services.trainer.captured import capture, checksums, read, require_undamaged, write
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.ranks import Ranks
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.trained import Progress, weights_checksum

FORMAT = 2
log = logging.getLogger(__name__)


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer needs beside the weights and the tensors of its optimizer."""

    version: int
    progress: dict[str, Progress]  # of the policy and the roles that learn beside it
    kl: float  # coefficient of algorithm.kl, 0 without
    cursor: Cursor | None  # None: the buffer could not be asked; its journal knows
    weights: str  # policy.weights_checksum
    files: dict[str, str]  # beside this one, with their xxh3_64
    config: dict[str, Any]
    format: int = FORMAT


class Resumed(NamedTuple):
    roles: Roles
    tokenizer: Any
    state: TrainerState


class Checkpoints:
    """Those of the run whose folder of checkpoints is `folder`; the newest `keep` stay. One is written while training
    goes on, in a thread of each rank, where all have their own. limit_s: until it must be written
    (trainer.checkpoint_s)."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None, limit_s: float = 600.0) -> None:
        self._folder, self._keep, self._ranks, self._limit_s = folder, keep, ranks or Ranks(), limit_s
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._group: Any = None  # of the ranks, apart from the one that training uses at the same time

    @property
    def versions(self) -> list[int]:
        """Of the complete ones, oldest first."""
        found = self._folder.glob("step-*/trainer/state.json")
        return sorted(int(path.parent.parent.name.removeprefix("step-")) for path in found)

    def path(self, version: int) -> Path:
        return self._folder / f"step-{version:08d}"

    def save(self, roles: Roles, tokenizer: Any, config: Config, version: int, cursor: Cursor | None = None) -> None:
        """Begin to write `roles` as they are after `version` steps, which may change when this returns; on all ranks at
        once. A kill in the middle leaves no folder of that name. Raises what became of the one before."""
        self.finish()
        leads = self._ranks.rank == 0
        if not bool(self._ranks.max_(torch.tensor(int(leads and version not in self.versions)))):
            return
        if leads:
            shutil.rmtree(self._partial(version), ignore_errors=True)
        if self._ranks.size > 1 and self._group is None:
            self._group = new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))
        model = roles.policy.model
        captured = capture(roles, lora.saved(model), weights_checksum(model), self._ranks)

        def write_it() -> Path:
            partial = self._partial(version)
            write(captured.parts, partial / "trainer", self._group)
            if not leads:
                return self.path(version)
            state = TrainerState(
                version,
                captured.progress,
                captured.kl,
                cursor,
                captured.weights,
                checksums(partial / "trainer"),
                msgspec.to_builtins(config),
            )
            lora.save(model, captured.policy, partial)
            tokenizer.save_pretrained(partial)
            (partial / "trainer" / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            return self._complete(version)

        self._writing = self._thread.submit(write_it)

    def finish(self) -> Path | None:
        """Where the one that was begun last is; None where none was begun since the last time. Raises what went wrong,
        and DeadlineExceeded after trainer.checkpoint_s."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            return writing.result(self._limit_s)
        except TimeoutError:
            raise DeadlineExceeded("the checkpoint that is written", self._limit_s, "trainer.checkpoint_s") from None
        except OSError as error:
            raise AsyncRLError(f"the checkpoint could not be written: {error}") from None

    def _partial(self, version: int) -> Path:
        return self._folder / f".{self.path(version).name}.partial"

    def _complete(self, version: int) -> Path:
        """Show it under its name."""
        partial, target = self._partial(version), self.path(version)
        _make_durable(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
        make_durable(self._folder)
        write_atomically(self._folder / "latest", target.name + "\n")
        for old in self.versions[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def state(self, version: int) -> TrainerState:
        """AsyncRLError where it cannot be read."""
        path = self.path(version) / "trainer" / "state.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=TrainerState)
        except (OSError, msgspec.DecodeError) as error:
            raise AsyncRLError(f"{path}: {error}") from None

    def resume(self, config: Config, first: Model) -> Resumed | None:
        """The newest that is whole, ready to go on; None without any. What is damaged is put aside with a warning.
        first: the model that the run began with. On all ranks at once.

        ConfigError where it was made under settings that `config` must not change."""
        for version in reversed(self.versions):
            path = self.path(version)
            try:
                return self.load(version, config, first)
            except (ConfigError, UserError):
                raise
            except (AsyncRLError, SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
                aside = path.with_name(f"damaged-{path.name}")
                if self._ranks.rank:
                    continue
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log.warning("%s cannot be read, an older checkpoint is taken: %s", aside, str(error).splitlines()[0])
        return None

    def load(self, version: int, settings: Config, first: Model, config: Config | None = None) -> Resumed:
        """Raises whatever a damaged file makes of it, on every rank. settings: what it was made under. config: what it
        goes on under, where that is another; the roles beside the policy begin anew under another algorithm."""
        path, state = self.path(version), self.state(version)
        require_same_run(parse(state.config, str(path / "trainer" / "state.json")), settings)
        config = settings if config is None else config
        self._require_undamaged(path / "trainer", state)
        model = msgspec.structs.replace(config.model, path=str(path))
        try:
            policy = Policy(lora.load(config, first, path), config, self._ranks)
        except ConfigError:
            raise
        except UserError as error:  # no mistake of the user's: it is the run's own folder
            raise AsyncRLError(str(error)) from None
        if weights_checksum(policy.model) != state.weights:
            raise AsyncRLError("its weights are not those that were written")
        roles = Roles.around(policy, config, first, self._ranks)
        same = config.algorithm == settings.algorithm
        if same:
            roles.kl = state.kl
        read(roles, state.progress, path / "trainer", beside=same)
        return Resumed(roles, load_tokenizer(model), state)

    def _require_undamaged(self, folder: Path, state: TrainerState) -> None:
        """Rank 0 looks."""
        problem: AsyncRLError | None = None
        if self._ranks.rank == 0:
            try:
                require_undamaged(folder, state.files)
            except AsyncRLError as error:
                problem = error
        if bool(self._ranks.max_(torch.tensor(int(problem is not None)))):
            raise problem or AsyncRLError(f"{folder}: rank 0 finds it damaged")


def _make_durable(folder: Path) -> None:
    for path in _files(folder):
        make_durable(path)


def _files(folder: Path) -> Iterator[Path]:
    yield from folder.rglob("*")
    yield folder
