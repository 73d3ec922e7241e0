"""Processes that never outlive who started them."""

import ctypes
import os
import signal
import sys

PARENT = "ASYNC_RL_PARENT"
"""Environment variable: the pid of the process that started this one and must not be outlived."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: str | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for signal `number` when the parent `parent` (a pid) ends; nothing without one.

    Linux alone has this; elsewhere a supervisor that is killed outright can leave children behind.
    """
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != int(parent):  # it ended before the call
        os.kill(os.getpid(), number)
