"""RUN on the command line: a run that was begun, by its folder or by the file that describes it."""

from pathlib import Path

from async_rl.config import Config, load
from async_rl.errors import UserError, nearest
from async_rl.rundir import RunDir


def named_run(name: str) -> tuple[RunDir, Path | None]:
    """The run, and the file of its settings: those that it was begun with, where its folder has them."""
    path = Path(name)
    if path.is_dir():
        run = RunDir(path)
    elif path.is_file():
        run = RunDir.of(load(path))
    else:
        others = [str(folder.parent) for folder in path.parent.glob("*/journal")] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such run; give its folder, or its TOML file{nearest(name, others)}")
    if not run.path.is_dir():
        raise UserError(f"{run.path}: this run was never begun")
    if run.config.exists():
        return run, run.config
    return run, path if path.is_file() else None


def settings_of(run: RunDir, file: Path | None) -> Config:
    """UserError where nobody knows them."""
    if file is None:
        raise UserError(f"{run.config}: no such file; give the run's own TOML file instead of its folder")
    return load(file)
