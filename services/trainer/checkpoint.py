"""Checkpoints: folders that plain transformers loads, complete or absent, with all that a run goes on from.

checkpoints/step-00000040/                  config, safetensors, tokenizer after 40 steps; with model.lora the
                                            adapter, as peft loads it, in place of the model
checkpoints/step-00000040/trainer/          state.json, optimizer.safetensors; NAME.safetensors and
                                            NAME_optimizer.safetensors of each role that learns beside the policy
checkpoints/latest                          the name of the newest
checkpoints/damaged-step-00000040/          one that could not be read again
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from async_rl.config.load import parse
from async_rl.config.resume import require_same_run
from async_rl.config.schema import Config, Model
from async_rl.errors import AsyncRLError, ConfigError, UserError
from async_rl.models.load import load_tokenizer
from async_rl.protocol.buffer import Cursor
from async_rl.rundir import make_durable, write_atomically
from async_rl.services.trainer import lora
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.trained import Progress, weights_checksum

FORMAT = 1
log = logging.getLogger(__name__)


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer needs beside the weights and the tensors of its optimizer."""

    version: int
    progress: dict[str, Progress]  # of the policy and the roles that learn beside it
    kl: float  # coefficient of algorithm.kl, 0 without
    cursor: Cursor | None  # None: the buffer could not be asked; its journal knows
    weights: str  # policy.weights_checksum
    config: dict[str, Any]
    format: int = FORMAT


class Resumed(NamedTuple):
    roles: Roles
    tokenizer: Any
    state: TrainerState


class Checkpoints:
    """Those of the run whose folder of checkpoints is `folder`; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    @property
    def versions(self) -> list[int]:
        """Of the complete ones, oldest first."""
        found = self._folder.glob("step-*/trainer/state.json")
        return sorted(int(path.parent.parent.name.removeprefix("step-")) for path in found)

    def path(self, version: int) -> Path:
        return self._folder / f"step-{version:08d}"

    def save(self, roles: Roles, tokenizer: Any, config: Config, version: int, cursor: Cursor | None = None) -> Path:
        """Write `roles` as they are after `version` steps. A kill in the middle leaves no folder of that name."""
        target = self.path(version)
        if version in self.versions:
            return target
        partial = self._folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        lora.save(roles.policy.model, partial)
        tokenizer.save_pretrained(partial)
        _save_state(partial / "trainer", roles, config, version, cursor)
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
        first: the model that the run began with.

        ConfigError where it was made under settings that `config` must not change."""
        for version in reversed(self.versions):
            path = self.path(version)
            try:
                return self.load(version, config, first)
            except (ConfigError, UserError):
                raise
            except (AsyncRLError, SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log.warning("%s cannot be read, an older checkpoint is taken: %s", aside, str(error).splitlines()[0])
        return None

    def load(self, version: int, config: Config, first: Model) -> Resumed:
        """Raises whatever a damaged file makes of it."""
        path, state = self.path(version), self.state(version)
        require_same_run(parse(state.config, str(path / "trainer" / "state.json")), config)
        model = msgspec.structs.replace(config.model, path=str(path))
        try:
            policy = Policy(lora.load(config, first, path), config)
        except ConfigError:
            raise
        except UserError as error:  # no mistake of the user's: it is the run's own folder
            raise AsyncRLError(str(error)) from None
        if weights_checksum(policy.model) != state.weights:
            raise AsyncRLError("its weights are not those that were written")
        roles = Roles.around(policy, config, first)
        roles.kl = state.kl
        for name, role in roles.beside().items():
            load_model(role.model, path / "trainer" / f"{name}.safetensors")
            role.go_on(state.progress[name], load_file(path / "trainer" / f"{name}_optimizer.safetensors"))
        tensors = load_file(path / "trainer" / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("random"))
        policy.go_on(state.progress["policy"], tensors)
        return Resumed(roles, load_tokenizer(model), state)


def _save_state(folder: Path, roles: Roles, config: Config, version: int, cursor: Cursor | None) -> None:
    folder.mkdir()
    policy, progress = roles.policy, {"policy": roles.policy.progress}
    save_file({"random": torch.get_rng_state(), **policy.optimizer_tensors()}, folder / "optimizer.safetensors")
    for name, role in roles.beside().items():
        progress[name] = role.progress
        save_model(role.model, str(folder / f"{name}.safetensors"))
        save_file(role.optimizer_tensors(), folder / f"{name}_optimizer.safetensors")
    weights = weights_checksum(policy.model)
    state = TrainerState(version, progress, roles.kl, cursor, weights, msgspec.to_builtins(config))
    (folder / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))


def _make_durable(folder: Path) -> None:
    for path in _files(folder):
        make_durable(path)


def _files(folder: Path) -> Iterator[Path]:
    yield from folder.rglob("*")
    yield folder
