"""Makes the folder at `model.path` ready for a run: warmed up, converted from a package, or already there."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from async_rl.config.schema import Config, Model
from async_rl.errors import ConfigError, UserError
from async_rl.models.folder import replaced_folder
from async_rl.models.load import check_path, from_gguf, packaged_gguf
from async_rl.models.tiny import check_shape
from async_rl.models.warmup import demonstrations, is_current, warmup


def prepare(config: Config, *, report: Callable[[str], None]) -> Path:
    """`model.path`, which transformers can load now. `report` gets a line for what takes long.

    Raises UserError where it cannot be made or is not there.
    """
    check_exclusive(config)
    if config.warmup is not None:
        return warmup(config, report=report)
    if config.model.from_package is not None and not Path(config.model.path).exists():
        return convert_package(config.model, report)
    return check_path(config.model)


def check(config: Config) -> None:
    """Raises what `prepare` would, as far as can be told without training or converting anything."""
    check_exclusive(config)
    if config.warmup is not None:
        check_shape(config.warmup)
        if not is_current(config):
            demonstrations(config)
    elif config.model.from_package is not None and not Path(config.model.path).exists():
        _gguf_of(config.model)
    else:
        check_path(config.model)


def check_exclusive(config: Config) -> None:
    if config.warmup is not None and config.model.from_package is not None:
        raise ConfigError(f"model.from_package = '{config.model.from_package}' and [warmup]: give one of them")


def convert_package(model: Model, report: Callable[[str], None]) -> Path:
    """Write the .gguf file of `model.from_package` as a folder at `model.path`."""
    source, path = _gguf_of(model), Path(model.path)
    report(f"model: converting {source.name} of package '{model.from_package}' to {path}")
    with replaced_folder(path) as fresh:
        from_gguf(source, fresh)
    return path


def _gguf_of(model: Model) -> Path:
    assert model.from_package is not None
    source = packaged_gguf(model.from_package)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"model.from_package = '{model.from_package}': reading .gguf files needs: pip install {' '.join(missing)}"
        )
    return source
