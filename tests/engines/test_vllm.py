"""The real vLLM, CPU build: `make test-vllm`, in an environment of its own.

One engine for the whole file, since each takes ten seconds to start; every test begins with an update of its own.
"""

import asyncio
import itertools

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config.schema import Model, Sampling, VLLMEngine
from async_rl.errors import EngineFault, PublicationError
from async_rl.services.rollout.engine import Draft
from async_rl.weights.manifest import aliases_of, seal, views
from tests.flow.rollout_material import packed

pytestmark = pytest.mark.vllm

TOLERANCE = 2e-4  # float32, another order of summation
VERSIONS = itertools.count(1)
END = 1
PROMPTS = [[5, 9, 13], [7] * 40, [20, 4, 6, 8, 30, 2] * 5, [11, 12]]


def llama(seed=0, *, tied=True, vocabulary=128):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


class Given:
    """Weights in a slot, as a subscriber hands them out."""

    def __init__(self, folder, model, version, lora=None):
        layout, data = packed(model)
        self.version = version
        self.manifest = msgspec.structs.replace(seal(layout, data, version=version, epoch=0), lora=lora)
        self.path = str(folder / f"slot-{version}")
        (folder / f"slot-{version}").write_bytes(data)
        self._data = data

    @property
    def aliases(self):
        return aliases_of(self.manifest)

    def tensors(self):
        return views(self.manifest.tensors, self._data)


class Bench:
    """The engine of `model`, and a loop that its tests share."""

    def __init__(self, folder, model, lora=None):
        self.tied, self.folder, self.runner = model.config.tie_word_embeddings, folder, asyncio.Runner()
        model.save_pretrained(folder / "model")
        self.engine = self.run(self._start(lora), 180)

    async def _start(self, lora):
        from async_rl.services.rollout.vllm_engine import VLLMEngine as Engine

        settings = VLLMEngine(max_requests=32, kv_cache_bytes=2**26)
        return await Engine.start(Model(path=str(self.folder / "model"), lora=lora), [END], settings)

    def run(self, work, limit_s=60):
        async def bounded():
            async with asyncio.timeout(limit_s):
                return await work

        return self.runner.run(bounded())

    async def update(self, model, *, lora=None, keep_cache=False):
        version = next(VERSIONS)
        weights = Given(self.folder, model, version, lora)

        async def read(apply):
            await apply(weights)
            return version

        await self.engine.update(read, keep_cache=keep_cache)
        return version

    async def sample(self, count=4, **sampling):
        settings = Sampling(**{"max_new_tokens": 24} | sampling)
        work = (self.engine.generate(PROMPTS[k % 4], settings, seed=k) for k in range(count))
        return await asyncio.gather(*work)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def bench(request, tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("vllm"), llama(0, tied=request.param))
    yield made
    made.run(made.engine.close())
    made.runner.close()


def under(model, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        table = (model(torch.tensor([prompt + tokens])).logits[0].float() / temperature).log_softmax(-1)
    return torch.tensor([table[len(prompt) + i - 1, t] for i, t in enumerate(tokens)])


def close_to(measured, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(torch.tensor(measured), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_transformers(bench, temperature):
    """Field report 14."""

    async def work():
        await bench.update(llama(0, tied=bench.tied))
        return await bench.sample(temperature=temperature)

    for prompt, done in zip(PROMPTS, bench.run(work()), strict=True):
        close_to(done.logprobs, under(llama(0, tied=bench.tied), prompt, done.tokens, temperature))
        assert done.stop == ("eos" if done.tokens[-1] == END else "length")


def test_after_an_update_they_are_those_of_the_new_weights(bench):
    """Field reports 28, 29, 32: fused layers, the tied head and cached prefixes are all of the new version."""

    async def work():
        await bench.update(llama(1, tied=bench.tied))
        before = await bench.sample()
        version = await bench.update(llama(2, tied=bench.tied))
        return before, await bench.sample(), version

    before, after, version = bench.run(work())
    for prompt, old, new in zip(PROMPTS, before, after, strict=True):
        close_to(old.logprobs, under(llama(1, tied=bench.tied), prompt, old.tokens))
        close_to(new.logprobs, under(llama(2, tied=bench.tied), prompt, new.tokens))
        assert [v for v, _ in new.versions] == [version]


def test_an_update_in_flight_loses_nothing_and_each_token_is_of_its_version(bench):
    """Field report 34: of 16 in flight none is aborted."""

    async def work():
        first = await bench.update(llama(3, tied=bench.tied))
        drafts = [Draft() for _ in range(16)]
        sampling = Sampling(max_new_tokens=300)
        tasks = [
            asyncio.create_task(bench.engine.generate(PROMPTS[k % 4], sampling, seed=k, draft=draft))
            for k, draft in enumerate(drafts)
        ]
        while not any(len(draft.tokens) > 20 for draft in drafts):
            await asyncio.sleep(0.01)
        second = await bench.update(llama(4, tied=bench.tied))
        return first, second, await asyncio.gather(*tasks)

    first, second, done = bench.run(work())
    assert any(len(made.versions) == 2 for made in done)
    for k, made in enumerate(done):
        old = sum(count for version, count in made.versions if version == first)
        assert {v for v, _ in made.versions} <= {first, second}
        close_to(made.logprobs[:old], under(llama(3, tied=bench.tied), PROMPTS[k % 4], made.tokens)[:old], 1e-3)
        close_to(made.logprobs[old:], under(llama(4, tied=bench.tied), PROMPTS[k % 4], made.tokens)[old:], 1e-3)


def test_a_kept_cache_keeps_the_oldest_version_and_serves_nobody_else(bench):
    async def work():
        first = await bench.update(llama(5, tied=bench.tied))
        draft = Draft()
        sampling = Sampling(max_new_tokens=200)
        task = asyncio.create_task(bench.engine.generate(PROMPTS[1], sampling, seed=3, draft=draft))
        while not draft.tokens:
            await asyncio.sleep(0.01)
        second = await bench.update(llama(6, tied=bench.tied), keep_cache=True)
        (fresh,) = await asyncio.gather(bench.engine.generate(PROMPTS[1], sampling, seed=4))
        return first, second, await task, fresh

    first, second, kept, fresh = bench.run(work())
    assert [v for v, _ in kept.versions] == [first]
    assert [v for v, _ in fresh.versions] == [second]
    close_to(fresh.logprobs, under(llama(6, tied=bench.tied), PROMPTS[1], fresh.tokens))


def test_weights_that_do_not_fit_leave_the_old_ones(bench):
    """Field report 35."""

    async def work():
        version = await bench.update(llama(7, tied=bench.tied))
        with pytest.raises(PublicationError, match="the model's"):
            await bench.update(llama(8, tied=bench.tied, vocabulary=127))
        return version, await bench.sample()

    version, done = bench.run(work())
    for prompt, made in zip(PROMPTS, done, strict=True):
        assert {v for v, _ in made.versions} == {version}
        close_to(made.logprobs, under(llama(7, tied=bench.tied), prompt, made.tokens))


def test_what_is_cancelled_is_aborted_and_leaves_its_partial_tokens(bench):
    async def work():
        await bench.update(llama(0, tied=bench.tied))
        draft = Draft()
        task = asyncio.create_task(bench.engine.generate([3, 4], Sampling(max_new_tokens=400), draft=draft))
        while len(draft.tokens) < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = list(draft.tokens)
        await bench.sample()
        return left, draft.tokens, draft.logprobs, bench.engine.unfinished

    left, after, logprobs, unfinished = bench.run(work())
    assert left == after and len(left) == len(logprobs) and unfinished == 0
    close_to(logprobs, under(llama(0, tied=bench.tied), [3, 4], left))


def test_a_group_computes_its_prompt_about_once(bench):
    """Prefilled tokens of a group of 8 are near 1/8 of the naive count."""
    prompt = [3 + i % 100 for i in range(400)]

    async def work():
        await bench.update(llama(0, tied=bench.tied))
        before = bench.engine.prefilled
        await asyncio.gather(*(bench.engine.generate(prompt, Sampling(max_new_tokens=2), seed=k) for k in range(8)))
        return bench.engine.prefilled - before

    assert bench.run(work()) < 0.3 * 8 * len(prompt)


def test_a_prompt_without_room_is_a_fault_of_its_own(bench):
    async def work():
        await bench.update(llama(0, tied=bench.tied))
        with pytest.raises(EngineFault, match="leaves no room"):
            await bench.engine.generate([3] * 512, Sampling())
        return await bench.engine.generate([3] * 500, Sampling(max_new_tokens=64))

    made = bench.run(work())
    assert len(made.tokens) <= 12 and made.stop in ("context", "eos")


def test_more_prompts_than_fit_a_forward_pass(bench):
    """vLLM cuts prompts in parts, and on a CPU a part of a seeded request ends the engine."""
    prompts = [[3 + (i * k) % 100 for i in range(450)] for k in range(1, 33)]

    async def work():
        await bench.update(llama(0, tied=bench.tied))
        sampling = Sampling(max_new_tokens=60)
        tasks = [asyncio.create_task(bench.engine.generate(p, sampling, seed=k)) for k, p in enumerate(prompts)]
        await asyncio.sleep(0.3)
        await bench.update(llama(1, tied=bench.tied))  # all that is in flight becomes a prompt again
        return await asyncio.gather(*tasks)

    assert len(bench.run(work())) == 32


def test_equal_seeds_sample_alike(bench):
    async def work():
        await bench.update(llama(0, tied=bench.tied))
        return [(await bench.sample())[0].tokens for _ in range(2)]

    first, second = bench.run(work())
    assert first == second


def test_it_sleeps_and_wakes_and_is_updated_after(bench):
    """On a CPU no memory moves, but the scheduler stands still until it wakes."""

    async def body():
        await bench.update(llama(3, tied=bench.tied))
        before = await bench.sample()
        await bench.engine.sleep()
        waiting = asyncio.create_task(bench.sample())
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        await bench.engine.wake()
        again = await waiting
        assert [made.tokens for made in again] == [made.tokens for made in before]
        await bench.engine.sleep()
        await bench.engine.wake()
        await bench.update(llama(4, tied=bench.tied))
        return (await bench.sample(1))[0]

    made = bench.run(body())
    close_to(made.logprobs, under(llama(4, tied=bench.tied), PROMPTS[0], made.tokens))
