"""Low-rank adapters as they are published: which layers of the base they are for, and as a folder in peft's format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_rl.errors import PublicationError
from async_rl.models.lora import CONFIG, PREFIX, TENSORS
from async_rl.protocol.weight_sync import Manifest
from async_rl.services.rollout.engine import Weights
from async_rl.weights.manifest import shapes_of

SIDES = (".lora_A.weight", ".lora_B.weight")  # [rank, in], [out, rank]


def layers(manifest: Manifest, base: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, str]]:
    """Weight of the base -> the names of its A and B. base: the shape of each of its tensors.

    PublicationError where the manifest is of no adapters, or of those of another base.
    """
    where = f"version {manifest.version} of the weights"
    if manifest.lora is None:
        raise PublicationError(f"{where}: a whole model, where model.lora asks for adapters")
    shapes, rank = shapes_of(manifest), manifest.lora.rank
    found: dict[str, tuple[str, str]] = {}
    for name in shapes:
        side = next((side for side in SIDES if name.endswith(side)), None)
        if side is None or not name.startswith(PREFIX):
            raise PublicationError(f"{where}: {name} is no adapter's")
        layer = name.removesuffix(side)
        found[f"{layer.removeprefix(PREFIX)}.weight"] = (layer + SIDES[0], layer + SIDES[1])
    for weight, (a, b) in found.items():
        if len(base.get(weight, ())) != 2:
            raise PublicationError(f"{where}: the model has no matrix {weight}")
        if a not in shapes or b not in shapes:
            raise PublicationError(f"{where}: {a if a not in shapes else b} is missing")
        out, into = base[weight]
        if shapes[a] != (rank, into) or shapes[b] != (out, rank):
            raise PublicationError(
                f"{where}: {a} is {list(shapes[a])} and {b} {list(shapes[b])}, for {weight} of {[out, into]} and rank "
                f"{rank} they are {[rank, into]} and {[out, rank]}"
            )
    return found


def write(weights: Weights, folder: Path) -> None:
    """The adapters `weights` as files that peft and vLLM read."""
    from safetensors.torch import save_file

    lora = weights.manifest.lora
    assert lora is not None
    settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
    (folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    save_file(dict(weights.tensors()), folder / TENSORS, {"format": "pt"})
