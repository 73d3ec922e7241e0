"""Results that are done while others are on their way go out together."""

import asyncio

import pytest

from async_rl.actor.outbox import MOST, MOST_BYTES, Outbox


def test_what_waits_goes_out_in_one_message_and_each_gets_its_own_reply():
    sent = []

    async def send(results):
        sent.append(results)
        await asyncio.sleep(0.01)
        return [f"reply to {result}" for result in results]

    async def main():
        box = Outbox(send)
        assert await asyncio.gather(*[box.hand_in(i) for i in range(MOST + 5)]) == [
            f"reply to {i}" for i in range(MOST + 5)
        ]
        assert await box.hand_in("late") == "reply to late"

    asyncio.run(main())
    assert [len(results) for results in sent] == [MOST, 5, 1]


def test_an_error_reaches_those_whose_results_it_was_and_no_others():
    async def send(results):
        await asyncio.sleep(0.01)
        if 0 in results:
            raise ConnectionError("gone")
        return results

    async def main():
        box = Outbox(send)
        first = asyncio.create_task(box.hand_in(0))
        await asyncio.sleep(0.005)
        second, third = asyncio.create_task(box.hand_in(1)), asyncio.create_task(box.hand_in(2))
        with pytest.raises(ConnectionError, match="gone"):
            await first
        assert await second == 1
        assert await third == 2

    asyncio.run(main())


def test_who_is_cancelled_holds_up_nobody():
    async def send(results):
        await asyncio.sleep(0.01)
        return results

    async def main():
        box = Outbox(send)
        first = asyncio.create_task(box.hand_in(0))
        second = asyncio.create_task(box.hand_in(1))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 1

    asyncio.run(main())


def test_a_message_is_bounded_in_bytes_but_a_single_result_always_goes():
    sent = []

    async def send(results):
        sent.append(results)
        await asyncio.sleep(0.01)
        return results

    async def main():
        half, over = MOST_BYTES // 2, MOST_BYTES + 1
        box = Outbox(send, weigh=lambda result: result)
        await asyncio.gather(*[box.hand_in(nbytes) for nbytes in (half, half, over, 1, half, half)])
        assert sent == [[half, half], [over], [1, half], [half]]

    asyncio.run(main())


def test_replies_that_are_missing_leave_nobody_waiting():
    async def send(results):
        return results[1:]

    async def main():
        with pytest.raises(ValueError, match="shorter"):
            await asyncio.wait_for(Outbox(send).hand_in(0), 5)

    asyncio.run(main())
