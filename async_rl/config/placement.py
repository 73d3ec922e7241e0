"""What `placement = "shared"` asks of the rest of a configuration. Pure."""

from collections.abc import Iterator

from async_rl.config.modes import bounds
from async_rl.config.schema import Config, TransformersEngine
from async_rl.errors import ConfigError


def placement_problems(config: Config) -> Iterator[str]:
    """One line each."""
    if config.placement != "shared":
        return
    limits, engine, trainer = bounds(config), config.rollout.engine, config.trainer
    for name, given, right in (("ranks", trainer.ranks, 1), ("offload", trainer.offload, False)):
        if given != right:
            yield (
                f"placement = 'shared' with trainer.{name} = {str(given).lower()}: models that take turns on a device "
                f"are whole; {str(right).lower()} there"
            )
    if trainer.dtype is not None:
        yield f"placement = 'shared' with trainer.dtype = '{trainer.dtype}': leave it out there"
    if limits.eta:
        yield (
            f"placement = 'shared': mode '{config.mode}' (staleness.max = {limits.eta}) trains and generates at the "
            "same time, which one device cannot; use mode 'sync'"
        )
    if isinstance(engine, TransformersEngine) and engine.device != config.trainer.device:
        yield (
            f"placement = 'shared': rollout.engine.device = '{engine.device}' is not "
            f"trainer.device = '{config.trainer.device}'"
        )


def refuse(config: Config) -> None:
    """ConfigError with the first problem."""
    for problem in placement_problems(config):
        raise ConfigError(problem)
