"""Which processes a run has."""

import sys
from pathlib import Path

from msgspec import Struct

from async_rl.config.schema import Config
from async_rl.weights.relays import relay_names


class Role(Struct, frozen=True):
    """One process of the run. `threads`: compute threads it may use, so that services do not fight for cores."""

    name: str  # "rollout-0"
    service: str  # "rollout"
    index: int
    threads: int
    python: str = sys.executable

    def command(self, run_toml: Path) -> list[str]:
        return [
            self.python,
            "-m",
            "async_rl.cli.main",
            "serve",
            self.service,
            str(run_toml),
            "--index",
            str(self.index),
        ]

    def environment(self) -> dict[str, str]:
        count = str(self.threads)
        return {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "OPENBLAS_NUM_THREADS": count,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONHASHSEED": "0",  # some of reasoning-gym's tasks are made in the order of a set
        }


def roster(config: Config) -> list[Role]:
    """Every process of the run, in the order they are started."""
    rollout, python = config.rollout, config.rollout.python or sys.executable
    return [
        Role("buffer", "buffer", 0, 1),
        *(Role(name, "weight-sync", k, 1) for k, name in enumerate(relay_names(config))),
        Role("trainer", "trainer", 0, config.trainer.threads),
        *(Role(f"rollout-{i}", "rollout", i, rollout.threads, python) for i in range(rollout.workers)),
        *(Role(f"reward-{i}", "reward", i, 1) for i in range(config.reward.workers)),
    ]


STOP_ORDER = ("rollout", "reward", "trainer", "weight-sync", "buffer")
"""Who holds leases goes first, so that they are given back; the buffer goes last, since all talk to it."""
