"""Low-rank adapters as files, in peft's format: adapter_config.json and adapter_model.safetensors beside a base that
stays where it is. Which layers of a model may have them.

peft is imported by what needs it (the extra "lora"); torch likewise.
"""

import importlib.util
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from async_rl.config.schema import Config, LoRA, SGLangEngine
from async_rl.errors import ConfigError, UserError, nearest

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's files


def require_peft(what: str) -> None:
    """UserError where peft is not installed, which `what` needs."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{what} needs peft: pip install 'async-rl[lora]'")


def engine_problem(config: Config) -> str | None:
    """Why the run's engine can take no adapters; None where it can."""
    if config.model.lora is not None and isinstance(config.rollout.engine, SGLangEngine):
        return "model.lora: engine 'sglang' takes whole models alone; use 'vllm' or 'transformers'"
    return None


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of the model that the adapter in `folder` belongs to."""
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    if not base or not Path(base).exists():
        raise UserError(f"{folder / CONFIG}: base_model_name_or_path = {json.dumps(base)}: no such folder")
    return Path(base)


def merge(base: Any, folder: Path) -> Any:
    """The model `base` with the adapter in `folder` added to its weights: an ordinary model again, to train or save."""
    require_peft(f"'{folder}', an adapter,")
    from peft import PeftModel

    try:
        whole = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"'{folder}': peft cannot load this adapter: {str(error).splitlines()[0]}") from None
    vars(whole).pop("peft_config", None)
    return whole.requires_grad_(True)


def linear_layers(model: Any) -> list[str]:
    """Names of the linear layers of the transformers model `model`, without its head."""
    import torch

    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head]


def targets(settings: LoRA, layers: Iterable[str]) -> list[str]:
    """Last parts of the names of those `layers` that get adapters; ConfigError for one that none has."""
    known = sorted({name.rpartition(".")[2] for name in layers})
    if not known:
        raise ConfigError("model.lora: the model has no linear layer that could have an adapter")
    for target in settings.targets:
        if target not in known:
            raise ConfigError(f"model.lora.targets: no linear layer is named '{target}'{_nearest(target, known)}")
    return sorted(set(settings.targets)) or known


def _nearest(target: str, known: Collection[str]) -> str:
    hint = nearest(target, known)
    if target.rpartition(".")[2] in known:
        return f" (give the last part, '{target.rpartition('.')[2]}')"
    return hint
