"""Plain functions with a deadline that is kept from outside: each call in a process that is killed at its deadline.

    pool = Processes(4)
    answer = await pool.call("my_tools:look_up", {"city": "Rome"})      # cancelled: the process is killed

Processes are kept and used again; one line of JSON in, one out. `python -m async_rl.agents.processes` is the other end.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from async_rl.actor.process import PARENT, die_with_parent
from async_rl.user_code import load

LINE_BYTES = 2**24


class ToolRaised(Exception):
    """What the function raised, in words."""


class Processes:
    """At most `size` at once; more calls wait their turn."""

    def __init__(self, size: int) -> None:
        self._room = asyncio.Semaphore(size)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def call(self, place: str, arguments: dict[str, Any]) -> Any:
        """What the function at `place` returns, as JSON tells it. ToolRaised where it raises, or ends its process."""
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            done = False
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps([place, arguments]).encode() + b"\n")
                line = await process.stdout.readline()
                done = bool(line)
            except (BrokenPipeError, ConnectionResetError, ValueError):  # ValueError: a line over LINE_BYTES
                line = b""
            finally:
                if done:
                    self._idle.append(process)
                else:
                    _kill(process)
            if not done:
                raise ToolRaised("the tool's process ended by itself, or its answer was too long")
            ok, value = json.loads(line)
            if not ok:
                raise ToolRaised(value)
            return value

    async def _start(self) -> asyncio.subprocess.Process:
        self._all = {process for process in self._all if process.returncode is None}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "async_rl.agents.processes"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,
            env=os.environ | {PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
        )
        self._all.add(process)
        return process

    async def close(self) -> None:
        for process in self._all:
            _kill(process)
        for process in self._all:
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """The process and what it has started; a cancelled call does not wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    die_with_parent(os.environ.get(PARENT), signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tool prints is no answer
    for line in sys.stdin:
        place, arguments = json.loads(line)
        try:
            value = [True, load("environment.run.functions", place, "tool(...)")(**arguments)]
            told = json.dumps(value, default=str)
        except Exception as error:
            told = json.dumps([False, f"{type(error).__name__}: {error}"])
        print(told, file=answers, flush=True)


if __name__ == "__main__":
    main()
