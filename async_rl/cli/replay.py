"""`async-rl replay RUN`: trains again from the journal, and compares with the run's checkpoints."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from async_rl.cli.check import batch_problems
from async_rl.cli.named import named_run, settings_of
from async_rl.config import Config, parse
from async_rl.config.dump import to_toml
from async_rl.config.load import apply_override, is_file, lay_over, read
from async_rl.errors import ConfigError, UserError
from async_rl.replay import Recorded, Replay, start
from async_rl.rundir import RunDir, write_atomically
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.metrics import StepRecord, mean
from async_rl.services.trainer.team import Team
from async_rl.supervisor.report import summary_table

CHANGEABLE = ("trainer", "algorithm", "batch.mini_batches", "batch.epochs")
"""What a replay can have otherwise: all else decided what was sampled and drawn."""


def replay(name: str, overrides: Sequence[str], *, steps: int | None, out: str | None) -> int:
    """Print a line a step and a table. Under the run's own settings weights that differ from those of a checkpoint
    of the run are an error."""
    run, file = named_run(name)
    settings = settings_of(run, file)
    config = changed(settings, overrides)
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps}: at least 1")
    recorded = Recorded(run.journal)
    try:
        if recorded.begin == recorded.end:
            raise UserError(f"{run.journal}: there is no step to replay yet")
        Printed(run, settings, config, folder(run, out)).replay(recorded, steps)
    finally:
        recorded.close()
    return 0


def changed(settings: Config, overrides: Sequence[str]) -> Config:
    """ConfigError for an override that a replay could not heed."""
    tree = msgspec.to_builtins(settings)
    for override in overrides:
        more = read(Path(override)) if is_file(override) else {}
        given = (f"{table}.{key}" for table, keys in more.items() for key in (keys if isinstance(keys, dict) else [""]))
        for key in given if is_file(override) else [override.partition("=")[0].strip()]:
            if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in CHANGEABLE):
                raise ConfigError(
                    f"override '{override}': a replay trains on what was sampled and drawn under {key}; it can change "
                    f"{', '.join(CHANGEABLE[:-1])} and {CHANGEABLE[-1]}"
                )
        if is_file(override):
            lay_over(tree, more)
        else:
            apply_override(tree, override)
    config = parse(tree)
    for problem in batch_problems(config):
        raise ConfigError(problem)
    return config


def folder(run: RunDir, out: str | None) -> Path:
    """Where the replay goes: `out`, which must be empty, or the next replay/N of the run."""
    if out is None:
        return run.next_replay()
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made: {error.strerror}") from None
    if any(target.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty")
    return target


class Printed:
    """A replay into `out`, told line by line. settings: the run's; config: the replay's."""

    def __init__(self, run: RunDir, settings: Config, config: Config, out: Path) -> None:
        self._run, self._settings, self._config, self._out = run, settings, config, out
        self._checkpoints = Checkpoints(run.checkpoints, settings.trainer.keep_checkpoints)
        self._console = Console()
        self._records: list[StepRecord] = []
        self._equal: list[int] = []  # versions whose weights are those of the run's checkpoint

    def replay(self, recorded: Recorded, steps: int | None) -> None:
        """At most `steps` steps. What stops it in the middle leaves a checkpoint of how far it came."""
        torch.set_num_threads(self._config.trainer.threads)
        write_atomically(self._out / "run.toml", to_toml(self._config))
        begun = start(self._run, self._settings, self._config, recorded.begin, self._out)
        began = time.monotonic()
        with Team(self._config, self._out / "checkpoints", self._out / "logs") as team:
            team.do(begun.load)
            work = Replay(team, self._config, self._out)
            end = recorded.end if steps is None else min(recorded.end, work.version + steps)
            self._say(f"{self._run.path}: versions {work.version} to {end} again, from {begun.name}")
            try:
                while work.version < end:
                    self._step(work, recorded, end)
            finally:
                saved = work.save()
            rows = self._rows(work, saved, time.monotonic() - began)
        self._console.print(summary_table(rows, f"replay of {self._run.path}"))

    def _step(self, work: Replay, recorded: Recorded, end: int) -> None:
        record = work.step(recorded)
        self._records.append(record)
        self._say(
            f"step {record.version}/{end} | reward {_figure(record.reward_mean, '.3f')} | "
            f"mismatch KL {_figure(record.mismatch_kl_k3, '.2e')}"
        )
        if self._config == self._settings and work.equals(self._checkpoints):
            self._equal.append(work.version)
            self._say(f"version {work.version}: equal to {self._checkpoints.path(work.version)}")

    def _rows(self, work: Replay, saved: Path, wall_s: float) -> list[tuple[str, str]]:
        rewards = [record.reward_mean for record in self._records if record.reward_mean is not None]
        mismatches = [record.mismatch_kl_k3 for record in self._records if record.mismatch_kl_k3 is not None]
        first, last = (rewards[0], rewards[-1]) if rewards else (None, None)
        return [
            ("steps", str(len(self._records))),
            ("reward", f"{_figure(first, '.3f')} -> {_figure(last, '.3f')}"),
            ("mismatch KL (k3)", _figure(mean(mismatches), ".2e")),
            ("weights", f"version {work.version}, {work.weights}"),
            ("as in the run", self._compared()),
            ("wall-clock", f"{wall_s:.1f} s"),
            ("checkpoint", str(saved)),
        ]

    def _compared(self) -> str:
        if self._config != self._settings:
            return "not compared: the settings are others"
        versions = ", ".join(map(str, self._equal))
        return (
            f"equal at version {versions}" if versions else "not compared: the run has no checkpoint of these versions"
        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _figure(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
