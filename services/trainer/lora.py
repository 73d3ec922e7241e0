"""A policy with low-rank adapters: what is trained, what a checkpoint holds, what is published.

peft puts the adapters into the plain transformers model, which stays of its own class; all else in the trainer sees
parameters that require no gradient, and a few that do. Names outside are those of peft's files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from async_rl.config.schema import Config, LoRA, Model
from async_rl.errors import ConfigError
from async_rl.models.load import load_policy
from async_rl.models.lora import PREFIX, TENSORS, linear_layers, require_peft, targets
from async_rl.protocol.weight_sync import LoRAInfo
from async_rl.services.trainer.ranks import sharded
from async_rl.services.trainer.trained import weights_checksum

ADAPTER = "default"  # peft's name for it, in names of parameters


def load(config: Config, first: Model, folder: Path | None = None) -> Any:
    """The model to train: `first`, or that of the checkpoint in `folder`. With `model.lora` it is `first`
    with new adapters, or with those of the checkpoint.

    ConfigError where the adapters of the checkpoint are of another base; KeyError, RuntimeError and SafetensorError
    where its file is damaged.
    """
    device = "cpu" if sharded(config.trainer) else config.trainer.device  # from there each rank takes its part
    first = in_trained_dtype(first, config)
    if config.model.lora is None:
        return load_policy(first if folder is None else _at(first, folder), device=device)
    model = load_policy(first, device=device)
    base = weights_checksum(model)
    attach(model, config.model.lora, config.seed)
    model.peft_config[ADAPTER].base_model_name_or_path = str(Path(first.path).resolve())
    model.base_checksum = base
    if folder is not None:
        _fill(model, folder / TENSORS, base, first.path)
    return model


def in_trained_dtype(model: Model, config: Config) -> Model:
    """`model` as the optimizer updates it; what it computes in is another thing."""
    return msgspec.structs.replace(model, dtype=config.trainer.dtype or model.dtype)


def attach(model: Any, settings: LoRA, seed: int) -> None:
    """Adapters for the linear layers of `model`, in float32 at least; they change nothing yet. The same for the
    same `seed`, on every rank and whatever was drawn before."""
    require_peft("model.lora")
    from peft import LoraConfig, inject_adapter_in_model

    names = targets(settings, linear_layers(model))
    alpha: Any = settings.alpha  # peft calls it an int, and computes with whatever it is
    adapter = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(adapter, model, ADAPTER)
    for parameter in adapters(model).values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()


def adapters(model: Any) -> dict[str, Tensor]:
    """The adapters' parameters by their names in peft's files; empty for a model without."""
    if not hasattr(model, "peft_config"):
        return {}
    return {
        PREFIX + name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def info(model: Any) -> LoRAInfo | None:
    """What the manifest of `model`'s publications says of its adapters; None for a model without."""
    if not hasattr(model, "peft_config"):
        return None
    settings = model.peft_config[ADAPTER]
    return LoRAInfo(settings.r, settings.lora_alpha, sorted(settings.target_modules))


def published(model: Any) -> Any:
    """What of `model` rollouts need: all of it, or its adapters by name."""
    return adapters(model) if hasattr(model, "peft_config") else model


def saved(model: Any) -> dict[str, Tensor]:
    """The tensors of `model` that a checkpoint has as files for other programs."""
    return adapters(model) if hasattr(model, "peft_config") else model.state_dict(keep_vars=True)


def save(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """`model` as a folder that transformers loads, or its adapters as one that peft loads. tensors: those of `saved`,
    whole and in the host's memory."""
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder, state_dict=tensors)
        return
    model.peft_config[ADAPTER].save_pretrained(folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / TENSORS,
        {"format": "pt", "base": model.base_checksum},
    )


def _fill(model: Any, path: Path, base: str, where: str) -> None:
    """The adapters in the file at `path` into those of `model`, whose base has the checksum `base`."""
    with safe_open(path, "pt") as opened:
        written: Mapping[str, str] = opened.metadata() or {}
        if written.get("base") != base:
            raise ConfigError(
                f"model.path = '{where}': its weights are no longer those that {path.parent} was trained on; "
                "put them back, or give a new name"
            )
        with torch.no_grad():
            for name, parameter in adapters(model).items():
                parameter.copy_(opened.get_tensor(name))


def _at(model: Model, folder: Path) -> Model:
    return msgspec.structs.replace(model, path=str(folder))
