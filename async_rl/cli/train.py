"""`async-rl train RUN.toml`: the whole run here, supervised; with `--resume`, one that was begun before."""

import asyncio
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from async_rl.cli.check import problems
from async_rl.cli.resume import Say, require_run, resume
from async_rl.config import Config, load
from async_rl.config.dump import to_toml
from async_rl.errors import UserError
from async_rl.models.prepare import prepare
from async_rl.rundir import RESULTS, RunDir, write_atomically
from async_rl.supervisor.report import LiveLine, read_summary, summary_rows, summary_table
from async_rl.supervisor.supervisor import Supervisor


def train(path: str, overrides: Sequence[str], *, quiet: bool = False, go_on: bool = False) -> int:
    """Run to the end and print the table. A fatal error of any service is raised, and is the last line.

    go_on: with what is there of the run, instead of from the beginning."""
    config = load(path, overrides)
    console = Console(stderr=False)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    run = RunDir.of(config)
    if go_on:
        require_run(config, run)
    refuse_problems(config)
    run.create()
    with run.claim("supervisor"):
        if go_on:
            resume(config, run, say)
        else:
            set_aside(run, say)
        prepare(config, report=say)
        write_atomically(run.config, to_toml(config))
        say(f"run {run.path}: mode {config.mode}, logs in {run.logs}")
        supervisor = Supervisor(config, run, LiveLine(config, run, console, quiet=quiet))
        asyncio.run(supervisor.supervise())
        summary = read_summary(run.summary)
        console.print(summary_table(summary_rows(summary, supervisor.restarts), f"run {config.name}"))
    return 0


def set_aside(run: RunDir, say: Say) -> None:
    """Make room for a run from the beginning."""
    unfinished = run.unfinished
    earlier = run.set_aside_previous((*RESULTS, "logs"))
    if earlier is None:
        return
    line = f"what an earlier run left is in {earlier}"
    if unfinished:
        line += "; it was not finished: `train --resume` would have gone on with it, and does once that is moved back"
    say(line)


def refuse_problems(config: Config) -> None:
    """UserError with the first problem that `async-rl check` would name."""
    for problem in problems(config):
        raise UserError(problem)
