"""Tools for the tests: functions of a module, so that another process can import them."""

import os
import time
from pathlib import Path
from typing import Annotated

from msgspec import Meta


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Not shown to the model."""
    return a + b


def nap(seconds: float, note: str = "") -> str:
    """Sleeps."""
    if note:
        Path(note).write_text(str(os.getpid()))
    time.sleep(seconds)
    return "awake"


def fail(why: str) -> str:
    """Raises."""
    raise RuntimeError(why)


def die() -> None:
    """Ends its process."""
    os._exit(3)


def shout(text: str) -> str:
    """Prints, which is no answer."""
    print(text)
    return text.upper()


def pick(level: Annotated[int, Meta(ge=1, le=3, description="how much")], tags: list[str]) -> dict[str, int]:
    """Counts."""
    return dict.fromkeys(tags, level)


async def wait(seconds: float) -> str:
    """A coroutine."""
    import asyncio

    await asyncio.sleep(seconds)
    return "done"
