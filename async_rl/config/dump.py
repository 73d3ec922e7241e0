"""A configuration as TOML: what `runs/NAME/run.toml` keeps."""

from typing import Any

import msgspec
import tomli_w

from async_rl.config.schema import Config


def to_toml(config: Config) -> str:
    """Every setting with its resolved value; reading it back gives an equal Config."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _without_none(value: Any) -> Any:
    # TOML has no null: a key that is absent takes its default, and None is only ever a default.
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
