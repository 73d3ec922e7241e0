"""What the engine says of its experts: those that a plain forward pass goes through, wherever a token was computed."""

import asyncio

import numpy as np
import pytest
import torch

from async_rl.config.schema import Sampling
from async_rl.config.schema import TransformersEngine as Settings
from async_rl.errors import ConfigError, UserError
from async_rl.services.rollout.backends import build
from async_rl.services.rollout.transformers_engine import TransformersEngine
from tests.unit.moe_material import PER_TOKEN, plain_routing, tiny_moe
from tests.unit.test_rollout_engine import llama, reader, weights_of
from tests.unit.trainer_material import configuration

torch.set_num_threads(1)
END = 1
PROMPTS = [[5, 9, 13], [7] * 11, [20, 4, 6, 8, 30, 2], [11, 12]]
LONG = [3 + i % 30 for i in range(30)]


def with_engine(body, *, ends=(END,), routing=True, **settings):
    """Run `body(engine)` with an engine of weights 0, under a deadline."""

    async def main():
        engine = TransformersEngine(tiny_moe(), list(ends), Settings(**settings), routing=routing)
        try:
            await engine.update(reader(weights_of(tiny_moe(), 0)))
            async with asyncio.timeout(60):
                return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def same(routing, expected):
    """As sets: the order of a token's experts is that of their weights, which are equal now and then."""
    assert routing.dtype == np.int8 and routing.shape == tuple(expected.shape)
    np.testing.assert_array_equal(np.sort(routing, axis=-1), np.sort(expected.numpy(), axis=-1))


def check(prompt, done, model=None):
    """All of the prompt, and of what was sampled all but the last, which went through no router."""
    same(done.routing, plain_routing(model or tiny_moe(), prompt + done.tokens)[:-1])


@pytest.mark.parametrize("batch", [256, 8])
def test_routing_is_that_of_a_plain_forward_pass(batch):
    """Requests of several lengths in one batch, prompts in parts where the batch is small."""

    async def body(engine):
        assert engine.returns_routing
        asked = [(p, Sampling(max_new_tokens=n)) for p, n in zip([*PROMPTS, LONG], (20, 3, 1, 9, 12), strict=True)]
        return await asyncio.gather(*(engine.generate(p, s, seed=i) for i, (p, s) in enumerate(asked)))

    for prompt, done in zip([*PROMPTS, LONG], with_engine(body, max_batch_tokens=batch, page_size=4), strict=True):
        check(prompt, done)
        assert done.routing.shape == (len(prompt) + len(done.tokens) - 1, 2, PER_TOKEN)


def test_members_that_share_the_pages_of_a_prompt_have_its_routing():
    """All but the first find whole pages of the prompt in the cache, and never compute them."""

    async def body(engine):
        computed = []
        take = engine._routing.take

        def counting(batch, requests):
            computed.append(sum(entry.query_length for entry in batch))
            take(batch, requests)

        engine._routing.take = counting
        sampling = Sampling(max_new_tokens=6)
        done = await asyncio.gather(*(engine.generate(LONG, sampling, seed=i) for i in range(5)))
        return done, sum(computed)

    done, computed = with_engine(body, ends=(), page_size=8)
    assert computed == 30 + 4 * (30 - 24) + 5 * 5
    for one in done:
        check(LONG, one)
    assert len({tuple(one.tokens) for one in done}) > 1


def test_a_further_turn_has_the_routing_of_the_pages_that_it_finds():
    async def body(engine):
        first = await engine.generate(LONG, Sampling(max_new_tokens=12), seed=1)
        prompt = LONG + first.tokens + [4, 5, 6]
        return prompt, await engine.generate(prompt, Sampling(max_new_tokens=5), seed=2)

    check(*with_engine(body, ends=(), page_size=4))


def test_after_an_update_in_flight_all_routing_is_of_the_new_weights():
    """The cache is computed again, so what was chosen under the old weights is no longer what tokens went through."""
    newer = tiny_moe(1)

    async def body(engine):
        tasks = [asyncio.create_task(engine.generate(p, Sampling(max_new_tokens=60))) for p in (LONG, LONG, [5, 9])]
        while not any(request.draft.tokens[3:] for request in engine._requests.values()):
            await asyncio.sleep(0)
        await engine.update(reader(weights_of(newer, 1)))
        return await asyncio.gather(*tasks)

    for prompt, done in zip((LONG, LONG, [5, 9]), with_engine(body, ends=(), page_size=8), strict=True):
        assert [version for version, _ in done.versions] == [0, 1]
        check(prompt, done, newer)


def test_with_a_kept_cache_each_token_keeps_the_routing_of_the_weights_that_computed_it():
    async def body(engine):
        task = asyncio.create_task(engine.generate(LONG, Sampling(max_new_tokens=60)))
        while not any(len(request.draft.tokens) > 3 for request in engine._requests.values()):
            await asyncio.sleep(0)
        (request,) = engine._requests.values()
        await engine.update(reader(weights_of(tiny_moe(1), 1)), keep_cache=True)
        return len(request.draft.tokens), await task

    at_least, done = with_engine(body, ends=())
    old = plain_routing(tiny_moe(), LONG + done.tokens)[: len(LONG) + 3]
    assert at_least >= 3
    same(done.routing[: len(LONG) + 3], old)
    assert len(done.routing) == len(LONG) + 59


def test_pages_of_another_request_never_give_their_routing():
    """A small cache: every page is written many times, some by requests that were cancelled."""

    async def body(engine):
        done = []
        for round_ in range(4):
            prompts = [[2 + round_, 7 + i, *LONG[:10]] for i in range(3)]
            gone = asyncio.create_task(engine.generate([9, 9, *LONG[:10]], Sampling(max_new_tokens=40)))
            made = await asyncio.gather(*(engine.generate(p, Sampling(max_new_tokens=9), seed=round_) for p in prompts))
            gone.cancel()
            done += zip(prompts, made, strict=True)
        return done

    for prompt, one in with_engine(body, ends=(), page_size=4, num_blocks=24):
        check(prompt, one)


def test_requests_that_a_full_cache_throws_back_have_the_routing_of_their_last_pass():
    """transformers computes them again from the beginning, under the same name."""
    prompts = [[2 + i, 9, 4] for i in range(8)]

    async def body(engine):
        again = []
        take = engine._routing.take

        def watching(batch, requests):
            again.extend(
                entry.state.request_id
                for entry in batch
                if entry.state.position_offset == entry.query_length > len(PROMPTS[0])
            )
            take(batch, requests)

        engine._routing.take = watching
        sampling = Sampling(max_new_tokens=40)
        return again, await asyncio.gather(*(engine.generate(p, sampling, seed=i) for i, p in enumerate(prompts)))

    again, done = with_engine(body, ends=(), page_size=4, num_blocks=24)
    assert again
    for prompt, one in zip(prompts, done, strict=True):
        check(prompt, one)


def test_without_being_asked_there_is_no_routing():
    async def body(engine):
        return await engine.generate([5, 9], Sampling(max_new_tokens=3))

    assert with_engine(body, routing=False).routing is None


def test_an_engine_of_a_model_without_experts_refuses_to_keep_routing():
    async def main():
        TransformersEngine(llama(), [END], Settings(), routing=True)

    with pytest.raises(UserError, match="it has no experts"):
        asyncio.run(main())


def test_a_worker_whose_engine_does_not_tell_its_experts_refuses_to_start():
    config = configuration(trainer={"router_replay": True}, rollout={"engine": {"kind": "fake"}})
    with pytest.raises(ConfigError, match=r"trainer\.router_replay = true: engine 'fake' does not say which experts"):
        asyncio.run(build(config))
