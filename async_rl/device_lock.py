"""Whose turn it is on the device that trainer and engines share (`placement = "shared"`).

The kernel keeps it: a lock (flock) on a file of the run, one for each host and device. A worker holds it shared while
its engine is awake, the trainer alone while its weights are on the device. Who dies has given it back.

It is asked for again and again instead of waited for, so that the event loop goes on and a wait can end. Nobody
starves: with a draw made, a run without lag hands out nothing but evaluation, which ends; and the trainer gives the
device back after every step.
"""

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from async_rl.config.schema import Config
from async_rl.errors import DeadlineExceeded
from async_rl.rundir import RunDir

ASK_S = 0.02
LOCKS = Path("/proc/locks")


class DeviceLock:
    def __init__(self, config: Config, run: RunDir) -> None:
        self._run, self.device = run, config.trainer.device
        kind, _, number = self.device.partition(":")
        name = kind if kind == "cpu" else f"{kind}-{number or 0}"
        self._path = run.device_lock(f"{socket.gethostname()}-{name}")
        self._handle = -1

    @property
    def held(self) -> bool:
        return self._handle >= 0

    def try_take(self, *, alone: bool) -> bool:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # no child of ours may keep it
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    async def take(
        self, *, alone: bool, deadline_s: float, setting: str, wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """False where it is not `wanted` any more. DeadlineExceeded, with the holders, after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not self.try_take(alone=alone):
            if not wanted():
                return False
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the device {self.device}, held by {self.holders()},", deadline_s, setting)
            await asyncio.sleep(ASK_S)
        return True

    def release(self) -> None:
        if self.held:
            os.close(self._handle)
            self._handle = -1

    def holders(self) -> str:
        """The services of the run that hold it, as the kernel tells."""
        try:
            inode = str(self._path.stat().st_ino)
            pids = {
                line[4]
                for line in map(str.split, LOCKS.read_text().splitlines())
                if line[1] == "FLOCK" and line[5].rpartition(":")[2] == inode
            }
        except (OSError, IndexError):
            pids = set()
        names = [f"{name} (pid {pid})" for name in self._run.services() if str(pid := self._run.pid(name)) in pids]
        return ", ".join(names) or "another process"
