"""Who waits for work is woken one at a time, and nobody who could be served is passed over."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from async_rl.buffers.line import Line


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10.0))


async def join(line: Line, order: list[str], name: str, wants: tuple[int, int] = (0, 0)) -> "asyncio.Task[None]":
    async def wait() -> None:
        with line.place(wants, name) as place:
            await place.wait(5.0)
            if place.turn.is_set():
                order.append(name)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


def test_a_change_wakes_the_first_in_line_alone() -> None:
    async def scenario() -> None:
        line, order = Line(), list[str]()
        first, second = await join(line, order, "first"), await join(line, order, "second")
        line.wake()
        await first
        assert order == ["first"]
        line.wake()
        await second
        assert order == ["first", "second"]

    play(scenario)


def test_a_turn_that_got_nothing_goes_to_those_that_ask_for_more_and_ends_with_the_line() -> None:
    async def scenario() -> None:
        line, order = Line(), list[str]()
        tasks = [
            await join(line, order, name, wants)
            for name, wants in (
                ("stale", (1, 8)),
                ("as stale", (1, 8)),
                ("small", (1, 4)),
                ("fresh", (2, 4)),
                ("large", (1, 16)),
            )
        ]
        line.wake()
        await tasks[0]
        line.pass_on((1, 8))
        await tasks[3]
        line.pass_on((2, 4))
        await asyncio.sleep(0)
        assert order == ["stale", "fresh", "as stale"]
        late = await join(line, order, "late", (9, 99))
        line.pass_on((1, 8))
        await tasks[4]
        line.pass_on((1, 16))  # the one that came after the change is not concerned
        await asyncio.sleep(0)
        assert not late.done()
        line.wake_all()
        await asyncio.gather(*tasks, late)

    play(scenario)


def test_who_is_called_comes_at_once_and_the_order_of_the_others_stands() -> None:
    async def scenario() -> None:
        line, order = Line(), list[str]()
        tasks = [await join(line, order, name) for name in ("first", "second", "third")]
        line.call("second")
        await tasks[1]
        line.call("nobody")
        line.wake()
        await tasks[0]
        assert order == ["second", "first"]
        line.wake_all()
        await tasks[2]

    play(scenario)


def test_a_change_between_the_attempt_and_the_wait_is_not_missed() -> None:
    async def scenario() -> None:
        line = Line()
        with line.place() as place:
            line.wake()
            await place.wait(5.0)
            assert place.turn.is_set()

    play(scenario)


@pytest.mark.parametrize("cancel", [False, True])
def test_who_gives_up_leaves_the_line(cancel: bool) -> None:
    async def scenario() -> None:
        line, order = Line(), list[str]()

        async def impatient() -> None:
            with line.place() as place:
                await place.wait(60.0 if cancel else 0.01)

        task = asyncio.create_task(impatient())
        await asyncio.sleep(0)
        second = await join(line, order, "second")
        if cancel:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        line.wake()
        await second
        assert order == ["second"]

    play(scenario)
