"""Starting, watching and stopping the processes of a run."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from async_rl.actor.process import PARENT
from async_rl.supervisor.roster import STOP_ORDER, Role


class Child:
    """One process of the run, in a session of its own: a Ctrl-C reaches the supervisor alone."""

    def __init__(self, role: Role, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.process = process
        self.started = time.monotonic()

    @classmethod
    async def start(cls, role: Role, run_toml: Path, log: Path) -> "Child":
        environment = os.environ | role.environment() | {PARENT: str(os.getpid())}
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *role.command(run_toml),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        return cls(role, process)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started

    def signal(self, number: int) -> None:
        """Send a signal to the process and to whatever it has started itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


async def stop_in_order(children: Iterable[Child], stop_s: float) -> None:
    """SIGTERM by STOP_ORDER, each kind of service up to `stop_s`; what is left then gets SIGKILL.

    The trainer and the relay are not waited for longer than the workers: all are gone after about
    len(STOP_ORDER) * stop_s at the very most.
    """
    everybody = list(children)
    for service in STOP_ORDER:
        stopping = [child for child in everybody if child.role.service == service and child.running]
        for child in stopping:
            child.process.terminate()
        await wait_for(stopping, stop_s)
        for child in stopping:
            child.signal(signal.SIGKILL)  # the whole group; graders, in groups of their own, end with their service
            await child.process.wait()


async def wait_for(children: Iterable[Child], seconds: float) -> bool:
    """Whether all of `children` ended within `seconds`."""
    waits = [asyncio.ensure_future(child.process.wait()) for child in children]
    if not waits:
        return True
    _, late = await asyncio.wait(waits, timeout=seconds)
    for wait in late:
        wait.cancel()
    return not late


def last_error(log: Path, fallback: str) -> str:
    """The last line of a service's log that tells an error, without its time stamp; `fallback` without one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]
    except OSError:
        return fallback
    for line in reversed(lines):
        _, found, message = line.partition(" ERROR ")
        if found and ": error: " in message:
            return message.replace(": error: ", ": ", 1)
        if line.startswith("async-rl: error: "):  # before the service had a log
            return line.removeprefix("async-rl: error: ")
    return fallback
