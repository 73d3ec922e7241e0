"""The configuration of a run: schema, presets, loading. Pulls in neither torch nor any engine."""

from async_rl.config.load import load, parse
from async_rl.config.modes import Bounds, bounds
from async_rl.config.schema import Config

__all__ = ["Bounds", "Config", "bounds", "load", "parse"]
