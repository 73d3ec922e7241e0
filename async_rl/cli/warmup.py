"""`async-rl warmup RUN.toml`: prepares the model of a run, once."""

from collections.abc import Sequence

from async_rl.config import load
from async_rl.models.prepare import prepare


def warmup(path: str, overrides: Sequence[str]) -> int:
    folder = prepare(load(path, overrides), report=print)
    print(f"model ready: {folder}")
    return 0
