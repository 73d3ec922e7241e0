"""What may change when a run goes on, and what would make it another run. Pure."""

from typing import Any, NamedTuple

import msgspec

from async_rl.config.schema import Config
from async_rl.errors import ConfigError

FREE = (
    "runs",
    "placement",
    "warmup",
    "staleness.max",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.checkpoint_s",
    "trainer.recompute",
    "trainer.offload",
    "trainer.ranks",
    "trainer.sequence_parallel",
    "trainer.tensor_parallel",
    "trainer.local_ranks",
    "trainer.rendezvous",
    "trainer.collective_s",
    "trainer.threads",
    "trainer.draw_wait_s",
    "rollout",
    "environment.retries",
    "environment.timeout_s",
    "environment.tool_processes",
    "environment.tool_timeout_s",
    "reward.workers",
    "reward.processes",
    "reward.timeout_s",
    "evaluation",
    "weight_sync",
    "journal",
    "services",
)
"""Keys that neither what is trained nor how depends on, but for the order of sums; staleness.max is kept in the
journal."""


class Difference(NamedTuple):
    key: str
    old: Any
    new: Any
    free: bool  # may change

    def __str__(self) -> str:
        return f"{self.key} = {_text(self.new)}, was {_text(self.old)}"


def differences(old: Config, new: Config) -> list[Difference]:
    """The settings in which `new` differs from what the run was begun with, in the order of the schema."""
    before, now = _flat(msgspec.to_builtins(old)), _flat(msgspec.to_builtins(new))
    return [
        Difference(key, before.get(key), now.get(key), _is_free(key, old))
        for key in {**now, **before}
        if before.get(key) != now.get(key)
    ]


def require_same_run(old: Config, new: Config) -> list[Difference]:
    """The differences; ConfigError with the first that makes `new` another run."""
    found = differences(old, new)
    for difference in found:
        if not difference.free:
            raise ConfigError(
                f"{difference}: a run that goes on keeps it; for another, give a new name and set model.path to a "
                "checkpoint of this one"
            )
    return found


def _is_free(key: str, old: Config) -> bool:
    if key == "max_steps":
        return old.trainer.schedule == "constant"  # else the learning rates so far would have been others
    return any(key == free or key.startswith(free + ".") for free in FREE)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists whole."""
    if not isinstance(tree, dict):
        return {path: list(tree) if isinstance(tree, tuple) else tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}.{key}" if path else key)
    return flat


def _text(value: Any) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()
