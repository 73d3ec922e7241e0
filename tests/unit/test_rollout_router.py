"""Several engines as one: where a prompt goes, and one update for all."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.schema import FakeEngine as Settings
from async_rl.config.schema import Sampling
from async_rl.errors import PublicationError
from async_rl.services.rollout.fake_engine import FakeEngine
from async_rl.services.rollout.router import BLOCK, IMBALANCE, RATIO, Engines, Router


def prompt(number, length=4 * BLOCK):
    return [number * 1000 + k for k in range(length)]


def test_a_group_stays_together_and_groups_spread():
    router = Router(3)
    placed = [[router.choose(prompt(group)) for _ in range(3)] for group in range(3)]
    assert [len(set(group)) for group in placed] == [1, 1, 1]
    assert {group[0] for group in placed} == {0, 1, 2}


def test_the_turns_of_an_episode_return_to_their_engine():
    router = Router(4)
    tokens = prompt(1)
    first = router.choose(tokens)
    for turn in range(3):
        router.done(first, tokens := tokens + prompt(10 + turn, 40))
        for other in range(3):  # traffic of others
            router.choose(prompt(100 * turn + other))
        assert router.choose([*tokens, 7]) == first


def test_no_engine_is_kept_busy_for_its_cache_alone():
    router = Router(2)
    placed = [router.choose(prompt(1)) for _ in range(200)]
    assert 60 <= placed.count(1) <= 100


def test_dropped_caches_draw_nobody():
    router = Router(2)
    home = router.choose(prompt(1))
    router.choose(prompt(2))
    router.forget()
    router.done(1 - home, [])
    assert router.choose(prompt(1)) == 1 - home


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200), st.integers(1, 4))
def test_loads_stay_within_the_rule(events, engines):
    router, open_ = Router(engines), []
    for number, ends in events:
        if ends and open_:
            router.done(*open_.pop())
        else:
            before = list(router.load)
            chosen = router.choose(prompt(number))
            least = min(before)
            assert before[chosen] - least <= IMBALANCE or before[chosen] <= RATIO * least
            open_.append((chosen, prompt(number)))
        assert sum(router.load) == len(open_)


class Nothing:
    def __init__(self, version):
        self.version, self.aliases = version, {}


def several(body, count=3):
    async def main():
        engines = [FakeEngine(Settings(tokens_per_s=500.0)) for _ in range(count)]
        async with asyncio.timeout(20):
            return await body(Engines(engines), engines)

    return asyncio.run(main())


def test_an_update_is_read_once_and_is_of_all():
    async def body(together, engines):
        reads = []

        async def read(apply):
            reads.append([engine._open.is_set() for engine in engines])
            await apply(Nothing(4))
            return 4

        await together.update(read)
        done = await asyncio.gather(*(together.generate(prompt(k), Sampling(max_new_tokens=4)) for k in range(6)))
        return reads, together.version, {v for made in done for v, _ in made.versions}

    assert several(body) == ([[False] * 3], 4, {4})


def test_weights_that_are_refused_leave_all_as_they_were():
    async def body(together, engines):
        async def good(apply):
            return 1

        async def bad(apply):
            raise PublicationError("another model's")

        await together.update(good)
        with pytest.raises(PublicationError, match="another model's"):
            await together.update(bad)
        made = await together.generate(prompt(1), Sampling(max_new_tokens=4))
        return [engine.version for engine in engines], made.versions[0][0]

    assert several(body) == ([1, 1, 1], 1)


def test_all_sleep_and_wake_together():
    async def body(together, engines):
        states = []
        for act in (together.sleep, together.wake):
            await act()
            states.append([engine.asleep for engine in engines])
        return states

    assert several(body) == [[True] * 3, [False] * 3]
