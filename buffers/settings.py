"""The numbers of a run that the state machine decides by."""

import math
from typing import Literal

from msgspec import Struct

from async_rl.config.modes import bounds, trajectories
from async_rl.config.schema import Config, Filter, OnExceed
from async_rl.errors import ConfigError

CHANGEABLE = ("eta", "max_steps", "max_failures", "lease_s", "lease_max_s", "samples")
"""Settings that may differ when a run goes on; all others decided what was sampled and drawn."""


class Settings(Struct, frozen=True):
    groups: int  # B, groups of a step
    group_size: int  # G, members of a group that are trained
    min_valid: int  # voting members without which a group is not ready
    eta: int  # bound on the lag of a token in the loss; may change during a run, see State.eta
    reuse: int  # r, consecutive steps that train one draw
    on_exceed: OnExceed
    hard_max: int | None  # bound under `correct`
    in_flight: bool  # one trajectory may hold several versions
    max_steps: int
    tasks: int | None  # length of the stream of tasks; None: endless
    at_end: Literal["smaller_step", "drop"]
    max_failures: int  # attempts of a group; failed groups in a row
    lease_s: float
    lease_max_s: float
    held_out: int  # tasks of an evaluation
    samples: int  # trajectories of each
    greedy: bool = False  # a group has one member more, which is sampled greedily and has no vote, for ReMax
    filter: Filter = Filter()
    data: dict[str, str] = {}  # fingerprint of each source, async_rl.data.fingerprint

    @classmethod
    def of(cls, config: Config, *, tasks: int | None, held_out: int, data: dict[str, str] | None = None) -> "Settings":
        """The settings of `config` for `tasks` tasks; ConfigError for what can never be served."""
        limits, batch = bounds(config), config.batch
        size = batch.group_size
        min_valid = batch.min_valid or min(size, max(2, math.ceil(size / 2)))
        if min_valid > size:
            raise ConfigError(f"batch.min_valid = {min_valid} exceeds batch.group_size = {size}")
        largest = max(trajectories(config), config.evaluation.samples if held_out else 0)
        if config.rollout.max_in_flight < largest:
            raise ConfigError(
                f"rollout.max_in_flight = {config.rollout.max_in_flight} holds no group of {largest} "
                f"(batch.group_size = {size}, evaluation.samples = {config.evaluation.samples})"
            )
        return cls(
            groups=batch.groups,
            group_size=size,
            greedy=trajectories(config) > size,
            min_valid=min_valid,
            eta=limits.eta,
            reuse=limits.reuse,
            on_exceed=limits.on_exceed,
            hard_max=limits.hard_max,
            in_flight=limits.in_flight,
            max_steps=config.max_steps,
            tasks=tasks,
            at_end=config.data.at_end,
            max_failures=config.services.max_failures,
            lease_s=config.services.lease_s,
            lease_max_s=config.services.lease_max_s,
            held_out=held_out,
            samples=config.evaluation.samples,
            filter=config.filter,
            data=data or {},
        )

    @property
    def members(self) -> list[int]:
        """Those of a new group; the greedy one, where there is one, is the last."""
        return list(range(self.group_size + self.greedy))

    def eta_prime(self, eta: int) -> int:
        """Largest lag at a draw, so that the last of `reuse` steps still keeps `eta`."""
        return eta - (self.reuse - 1)

    def reach(self, eta: int) -> int:
        """How many steps after its oldest version a group admitted under `eta` can be drawn."""
        return self.eta_prime(eta if self.hard_max is None else self.hard_max)

    @property
    def max_filtered(self) -> int:
        """Groups dropped in a row by the filter that end the run."""
        return self.filter.max_in_row or 10 * self.groups

    @property
    def waits(self) -> bool:
        """Nothing is lost: a draw must leave the rest feasible."""
        return self.on_exceed in ("wait", "correct")


def require_continuable(old: Settings, new: Settings) -> None:
    """ConfigError with the first setting that a run cannot go on under."""
    for name in Settings.__struct_fields__:
        before, now = getattr(old, name), getattr(new, name)
        if before == now or name in CHANGEABLE:
            continue
        if name == "data":
            raise ConfigError(f"the data is not that of this run: {', '.join(changed_data(before, now))} changed")
        raise ConfigError(f"this run was begun with {name} = {before}, now it is {now}; a run that goes on keeps it")


def changed_data(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """The sources whose fingerprints differ, and "order" where that does."""
    return sorted(key for key in old | new if old.get(key) != new.get(key))
