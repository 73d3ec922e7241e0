"""A model folder appears whole or not at all; what its configuration tells."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a configuration's names for those of a layer


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A fresh folder beside `path` to write into; it takes the place of `path` when the block ends well.

    On an error `path` is left as it was and the fresh folder is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as workplace:
        fresh, old = Path(workplace) / "fresh", Path(workplace) / "old"
        fresh.mkdir()
        yield fresh
        if path.exists():
            path.rename(old)
        fresh.rename(path)


def expert_problem(folder: Path) -> str | None:
    """Why the model in `folder` has no routing to replay, as far as its configuration tells; None where it may have."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = config.get("text_config") or config
    if any((text.get(key) or 0) > 1 for key in EXPERTS):
        return None
    return f"the model in '{folder}', a {text.get('model_type')}, has no experts"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the folder's safetensors files, read from their headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes
