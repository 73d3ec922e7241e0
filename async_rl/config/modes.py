"""Modes are presets of the same numbers, never separate code paths.

| mode       | eta | in-flight weight update | reuse |
|------------|-----|-------------------------|-------|
| sync       | 0   | no                      | 1     |
| one-step   | 1   | no                      | 1     |
| async      | k   | yes                     | 1     |
| off-policy | k   | yes                     | r     |
"""

from msgspec import Struct

from async_rl.config.algorithms import Correction, ReMax, Weights
from async_rl.config.schema import Config, Mode, OnExceed
from async_rl.errors import ConfigError


class Bounds(Struct, frozen=True):
    """What the buffer, the rollouts and the trainer need to know of staleness."""

    eta: int  # largest lag of a token in the loss
    in_flight: bool  # weights change under running requests
    reuse: int  # consecutive steps that train one draw
    on_exceed: OnExceed
    hard_max: int | None = None  # bound under `correct`
    keep_cache: bool = False

    @property
    def eta_prime(self) -> int:
        """Largest lag at a draw, so that the last of `reuse` steps still keeps eta."""
        return self.eta - (self.reuse - 1)


_PRESETS: dict[Mode, Bounds] = {
    "sync": Bounds(eta=0, in_flight=False, reuse=1, on_exceed="wait"),
    "one-step": Bounds(eta=1, in_flight=False, reuse=1, on_exceed="wait"),
    "async": Bounds(eta=2, in_flight=True, reuse=1, on_exceed="mask"),
    "off-policy": Bounds(eta=4, in_flight=True, reuse=2, on_exceed="mask"),
}


def bounds(config: Config) -> Bounds:
    """The numbers of `config.mode` with what `[staleness]` says over them."""
    preset, asked = _PRESETS[config.mode], config.staleness
    eta = preset.eta if asked.max is None else asked.max
    reuse = preset.reuse if asked.reuse is None else asked.reuse
    on_exceed = preset.on_exceed if asked.on_exceed is None else asked.on_exceed
    if config.mode in ("sync", "one-step") and eta != preset.eta:
        raise ConfigError(
            f"staleness.max = {eta}: mode '{config.mode}' is {preset.eta} by definition; use mode 'async'"
        )
    if config.mode != "off-policy" and reuse != 1:
        raise ConfigError(f"staleness.reuse = {reuse}: only mode 'off-policy' trains a draw more than once")
    if eta - (reuse - 1) < 0:
        raise ConfigError(f"staleness.reuse = {reuse} needs staleness.max of at least {reuse - 1}, not {eta}")
    if on_exceed == "mask" and not preset.in_flight:
        raise ConfigError(
            f"staleness.on_exceed = 'mask': mode '{config.mode}' has one version per trajectory; use 'wait' or 'drop'"
        )
    if on_exceed == "correct" and asked.hard_max is None:
        raise ConfigError("staleness.on_exceed = 'correct' needs staleness.hard_max")
    if on_exceed == "correct" and asked.hard_max is not None and asked.hard_max < eta:
        raise ConfigError(f"staleness.hard_max = {asked.hard_max} is below staleness.max = {eta}")
    if on_exceed != "correct" and asked.hard_max is not None:
        raise ConfigError(f"staleness.hard_max belongs to on_exceed = 'correct', not '{on_exceed}'")
    if asked.keep_cache and not preset.in_flight:
        raise ConfigError(f"staleness.keep_cache: mode '{config.mode}' has no in-flight update")
    return Bounds(
        eta=eta,
        in_flight=preset.in_flight,
        reuse=reuse,
        on_exceed=on_exceed,
        hard_max=asked.hard_max,
        keep_cache=asked.keep_cache,
    )


def trajectories(config: Config) -> int:
    """Of a training group: batch.group_size, and for ReMax the greedy one beside them."""
    return config.batch.group_size + isinstance(config.algorithm.advantage, ReMax)


def correction(config: Config) -> Correction:
    """`algorithm.correction`, or what the bound on staleness asks for: from lag 2 on the decoupled loss."""
    if config.algorithm.correction is not None:
        return config.algorithm.correction
    limits = bounds(config)
    if (limits.hard_max or limits.eta) <= 1:
        return Correction()
    return Correction(proximal="recompute", weights=Weights())
