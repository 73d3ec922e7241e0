"""`async-rl export CHECKPOINT_OR_RUN OUT`: a model folder for others, with adapters merged into their base."""

import json
from pathlib import Path

import msgspec

from async_rl.config.schema import Model
from async_rl.errors import UserError, nearest
from async_rl.models.folder import replaced_folder
from async_rl.models.load import check_path, load_policy, load_tokenizer
from async_rl.models.lora import base_of, is_adapter

DTYPES = ("float32", "bfloat16", "float16")


def export(name: str, out: str) -> int:
    """Write the model as one folder that plain transformers loads, tokenizer included, in the dtype of the base."""
    source, target = checkpoint_of(Path(name)), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out}: it is there already; name a folder that is new or empty")
    check_path(Model(path=str(source)))
    model = msgspec.convert({"path": str(source), "dtype": _dtype(source)}, Model)
    policy, tokenizer = load_policy(model), load_tokenizer(model)
    with replaced_folder(target) as fresh:
        policy.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    print(f"{target}: {source}{f', merged with {base_of(source)}' if is_adapter(source) else ''}")
    return 0


def checkpoint_of(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run whose folder it is."""
    if not path.is_dir():
        others = [str(p) for p in (*path.parent.glob("*/checkpoints"), *path.parent.glob("step-*"))]
        raise UserError(f"{path}: no such checkpoint or run{nearest(str(path), others)}")
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir():
        return path
    try:
        return checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        raise UserError(f"{checkpoints}: the run has no checkpoint yet") from None


def _dtype(folder: Path) -> str:
    """What the weights in `folder`, or the base of its adapter, are stored in."""
    while is_adapter(folder):
        folder = base_of(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = written.get("dtype") or written.get("torch_dtype")
    return found if found in DTYPES else "float32"
