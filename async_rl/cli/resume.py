"""What `async-rl train --resume` asks before anything starts: whether there is a run, and whether it may go on."""

from collections.abc import Callable
from pathlib import Path

from async_rl.config import Config, load
from async_rl.config.dump import to_toml
from async_rl.config.resume import require_same_run
from async_rl.errors import UserError, nearest
from async_rl.rundir import RunDir, write_atomically
from async_rl.supervisor.report import read_summary

Say = Callable[[str], None]


def resume(config: Config, run: RunDir, say: Say) -> None:
    """Make `run` ready to go on under `config`: every change told, nothing set aside but the summary of a run that
    gets more steps. UserError where there is nothing more to do; ConfigError where it would be another.
    """
    changes = allowed_changes(config, run)
    if run.complete:
        require_more(config, run)
        say(f"the summary so far is in {run.set_aside_previous(('summary.json',))}")
    for line in changes:
        say(line)


def require_run(config: Config, run: RunDir) -> None:
    """UserError, with the runs there are, where there is none to go on with."""
    if not (run.unfinished or run.complete):
        others = sorted(path.parent.name for path in Path(config.runs).glob("*/run.toml"))
        raise UserError(f"{run.path}: there is no run to go on with{nearest(config.name, others)}")


def allowed_changes(config: Config, run: RunDir) -> list[str]:
    """A line each: what `config` changes of the run. ConfigError with the first setting that it must not."""
    if not run.config.exists():
        return []  # begun by hand: the trainer compares with its checkpoint, the buffer with its journal
    return [str(difference) for difference in require_same_run(load(run.config), config)]


def require_more(config: Config, run: RunDir) -> None:
    """UserError where a run that has its summary has made all its steps."""
    summary = read_summary(run.summary)
    if summary["ended"] != "max_steps":
        raise UserError(f"{run.path}: the run is complete after {summary['steps']} steps: {summary['ended']}")
    if config.max_steps <= summary["steps"]:
        raise UserError(
            f"{run.path}: the run is complete, with all its {summary['steps']} steps; a higher max_steps makes it go on"
        )


def keep_config(config: Config, run: RunDir) -> None:
    """What a trainer that is started by hand trains with; a run that it goes on with is not made another."""
    if run.unfinished:
        allowed_changes(config, run)
    write_atomically(run.config, to_toml(config))
