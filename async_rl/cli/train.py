"""`async-rl train RUN.toml`: the whole run here, supervised."""

import asyncio
from collections.abc import Sequence

from rich.console import Console

from async_rl.cli.check import problems
from async_rl.config import Config, load
from async_rl.config.dump import to_toml
from async_rl.errors import UserError
from async_rl.models.prepare import prepare
from async_rl.rundir import RESULTS, RunDir, write_atomically
from async_rl.supervisor.report import LiveLine, read_summary, summary_rows, summary_table
from async_rl.supervisor.supervisor import Supervisor


def train(path: str, overrides: Sequence[str], *, quiet: bool = False) -> int:
    """Run to the end and print the table. A fatal error of any service is raised, and is the last line."""
    config = load(path, overrides)
    console = Console(stderr=False)
    refuse_problems(config)
    run = RunDir.of(config)
    run.create()
    with run.claim("supervisor"):
        earlier = run.set_aside_previous((*RESULTS, "logs", "journal"))
        if earlier is not None:
            console.print(f"what an earlier run left is in {earlier}", highlight=False, markup=False)
        prepare(config, report=lambda text: console.print(text, highlight=False, markup=False))
        write_atomically(run.config, to_toml(config))
        console.print(f"run {run.path}: mode {config.mode}, logs in {run.logs}", highlight=False, markup=False)
        supervisor = Supervisor(config, run, LiveLine(config, run, console, quiet=quiet))
        asyncio.run(supervisor.supervise())
        summary = read_summary(run.summary)
        console.print(summary_table(summary_rows(summary, supervisor.restarts), f"run {config.name}"))
    return 0


def refuse_problems(config: Config) -> None:
    """UserError with the first problem that `async-rl check` would name."""
    for problem in problems(config):
        raise UserError(problem)
