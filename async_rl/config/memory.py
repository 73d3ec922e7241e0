"""How much memory a run takes, from the header of the model's files: no tensor is loaded."""

import json
import os
import struct
from pathlib import Path

from msgspec import Struct

from async_rl.config.algorithms import GAE, PRIME
from async_rl.config.schema import Config, FakeEngine

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_BYTES = 12  # per parameter: gradient and AdamW's two moments, float32


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
    workers = 0 if isinstance(config.rollout.engine, FakeEngine) else config.rollout.workers
    algorithm, learning = config.algorithm, isinstance(config.algorithm.advantage, GAE | PRIME)
    frozen = (algorithm.kl is not None or isinstance(algorithm.advantage, PRIME)) + (algorithm.teacher is not None)
    return Estimate(
        parameters=count,
        trainer=(1 + learning) * (weights + count * OPTIMIZER_BYTES) + frozen * weights,
        rollouts=weights * workers,
        slots=weights * config.weight_sync.slots * config.weight_sync.relays,
    )


def parameters(folder: Path) -> int:
    """Number of parameters in the folder's safetensors files, tied ones once."""
    return sum(_elements(path) for path in folder.glob("*.safetensors"))


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for dimension in tensor["shape"]:
                size *= dimension
            total += size
    return total


def readable(count: int) -> str:
    """`1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
