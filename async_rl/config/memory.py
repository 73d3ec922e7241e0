"""How much memory a run takes, from the header of the model's files: no tensor is loaded."""

import json
import math
import os
import struct
from pathlib import Path

from msgspec import Struct

from async_rl.config.algorithms import GAE, PRIME
from async_rl.config.schema import Config, FakeEngine, LoRA, TransformersEngine

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_BYTES = 12  # per parameter: gradient and AdamW's two moments, float32
NOT_LINEAR = ("embed", "head", "wte", "wpe")  # in names of matrices that get no adapter


class Estimate(Struct, frozen=True):
    """Bytes; activations and the KV cache come on top."""

    parameters: int
    trainer: int
    rollouts: int
    slots: int

    @property
    def total(self) -> int:
        return self.trainer + self.rollouts + self.slots

    def describe(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters: trainer {readable(self.trainer)}, "
            f"rollouts {readable(self.rollouts)}, weights in shared memory {readable(self.slots)}, "
            "before activations and caches"
        )

    @staticmethod
    def machine_bytes() -> int:
        """Physical memory; 0 where the system does not tell."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return 0


def estimate(config: Config) -> Estimate | None:
    """None where the model's folder does not exist yet or has no safetensors. The roles beside the policy are taken
    to be of its size."""
    count = parameters(Path(config.model.path))
    if not count:
        return None
    weights = count * DTYPE_BYTES[config.model.dtype]
    learner = count * (DTYPE_BYTES[config.trainer.dtype or config.model.dtype] + OPTIMIZER_BYTES)
    trained, published, sampler = learner, weights, weights
    if config.model.lora is not None:
        adapted = adapted_layers(Path(config.model.path), config.model.lora)
        adapters = config.model.lora.rank * sum(sum(shape) for shape in adapted)
        trained, published = weights + adapters * (4 + OPTIMIZER_BYTES), 4 * adapters  # they are float32
        if isinstance(config.rollout.engine, TransformersEngine):  # keeps the base of what it merges into
            sampler += sum(math.prod(shape) for shape in adapted) * DTYPE_BYTES[config.model.dtype]
    workers = 0 if isinstance(config.rollout.engine, FakeEngine) else config.rollout.workers
    algorithm, learning = config.algorithm, isinstance(config.algorithm.advantage, GAE | PRIME)
    frozen = (algorithm.kl is not None or isinstance(algorithm.advantage, PRIME)) + (algorithm.teacher is not None)
    return Estimate(
        parameters=count,
        trainer=trained + learning * learner + frozen * weights,
        rollouts=sampler * workers,
        slots=published * config.weight_sync.slots * config.weight_sync.relays,
    )


def parameters(folder: Path) -> int:
    """Number of parameters in the folder's safetensors files, tied ones once."""
    return sum(math.prod(shape) for shape in _shapes(folder).values())


def adapted_layers(folder: Path, lora: LoRA) -> list[list[int]]:
    """Shapes of the layers of the model in `folder` that get adapters. Without targets, what looks like a linear layer
    by name and shape counts as one."""
    found = []
    for name, shape in _shapes(folder).items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        chosen = layer in lora.targets if lora.targets else not any(part in layer for part in NOT_LINEAR)
        if chosen and len(shape) == 2 and name.endswith(".weight"):
            found.append(shape)
    return found


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Of the tensors in the folder's safetensors files, by name."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return shapes


def readable(count: int) -> str:
    """`1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
