"""Which relays a run has, and which of them is a rollout's."""

from collections.abc import Sequence
from pathlib import Path

from async_rl.config.schema import Config
from async_rl.errors import UserError
from async_rl.rundir import RunDir, here


def relay_names(config: Config) -> list[str]:
    """Their names as services: one is `weight_sync`, several are numbered."""
    count = config.weight_sync.relays
    return ["weight_sync"] if count == 1 else [f"weight_sync-{k}" for k in range(count)]


def relay_of(config: Config, run: RunDir, worker: int) -> str | None:
    """The relay of rollout `worker` on this host; None while those that could be it have not announced themselves."""
    names = relay_names(config)
    if len(names) == 1:
        return names[0]
    index = chosen([run.host(name) for name in names], here(), worker)
    return None if index is None else names[index]


def chosen(hosts: Sequence[str | None], own: str, worker: int) -> int | None:
    """Index of the relay of rollout `worker` on host `own`. hosts: of each relay, None where it is not known yet.

    The rollouts of a host are spread over its relays by their numbers. Raises UserError where it has none.
    """
    first = worker % len(hosts)
    if hosts[first] == own:
        return first
    if None in hosts:
        return None
    near = [index for index, host in enumerate(hosts) if host == own]
    if not near:
        raise UserError(
            f"no relay runs on {own}, and weights are fetched on their own host: start `async-rl serve weight-sync` "
            f"there (weight_sync.relays = {len(hosts)}, on {', '.join(sorted({host for host in hosts if host}))})"
        )
    return near[worker % len(near)]


def folder_of(config: Config, run: RunDir) -> Path:
    """The folder that the trainer and the relays share, with the transport "disk"."""
    return Path(config.weight_sync.path) if config.weight_sync.path else run.path / "weights"
