"""The transformers engine: what it samples, under which weights, with which log-probabilities."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config.schema import Sampling
from async_rl.config.schema import TransformersEngine as Settings
from async_rl.errors import EngineDied, EngineFault, PublicationError
from async_rl.services.rollout.engine import Draft
from async_rl.services.rollout.live_weights import checksum
from async_rl.services.rollout.transformers_engine import TransformersEngine
from async_rl.trajectory import token_versions

torch.set_num_threads(1)
END = 1
PROMPTS = [[5, 9, 13], [7] * 11, [20, 4, 6, 8, 30, 2], [11, 12]]


def llama(seed=0, *, tied=True, context=96):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,  # distributions worth sampling from
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class Given:
    """Weights as a subscriber hands them out."""

    version: int
    named: dict
    aliases: dict = field(default_factory=dict)

    def tensors(self):
        return iter(self.named.items())


def weights_of(model, version):
    """Tied tensors once, as a trainer publishes them."""
    names = {name: p.detach() for name, p in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    owner = {p.data_ptr(): name for name, p in names.items()}
    aliases = {name: owner[p.data_ptr()] for name, p in everything if name not in names}
    return Given(version, names, aliases)


def reader(*given):
    async def read(apply):
        for weights in given:
            await apply(weights)
        return given[-1].version

    return read


def with_engine(body, *, model=None, ends=(END,), **settings):
    """Run `body(engine)` with an engine of `model`, under a deadline."""

    async def main():
        engine = TransformersEngine(model or llama(), list(ends), Settings(**settings))
        try:
            await engine.update(reader(weights_of(llama(), 0)))
            async with asyncio.timeout(60):
                return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def forward_logprobs(model, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    scaled = (logits / temperature).log_softmax(-1)
    return torch.tensor([scaled[len(prompt) + i - 1, t] for i, t in enumerate(tokens)])


def close_to(measured, expected, tolerance=1e-4):
    torch.testing.assert_close(torch.tensor(measured), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_log_probabilities_are_those_of_the_tempered_distribution(temperature):
    """Field report 14: sampler and trainer at T = 0.6 both use log_softmax(z / T)."""
    sampling = Sampling(temperature=temperature, max_new_tokens=20)

    async def body(engine):
        return await asyncio.gather(*(engine.generate(p, sampling, seed=i) for i, p in enumerate(PROMPTS)))

    for prompt, done in zip(PROMPTS, with_engine(body), strict=True):
        close_to(done.logprobs, forward_logprobs(llama(), prompt, done.tokens, temperature))


def test_a_prompt_longer_than_one_batch_is_sampled_alike():
    prompt = [3 + i % 30 for i in range(50)]

    async def body(engine):
        sampling = Sampling(max_new_tokens=8)
        return await asyncio.gather(*(engine.generate(prompt, sampling, seed=i) for i in range(3)))

    for done in with_engine(body, max_batch_tokens=16, page_size=8):
        close_to(done.logprobs, forward_logprobs(llama(), prompt, done.tokens))


def test_requests_of_every_kind_run_beside_one_another():
    """Greedy evaluation and other temperatures are per request, whatever else is in the batch."""

    async def body(engine):
        hot, cold = Sampling(temperature=2.0, max_new_tokens=12), Sampling(temperature=0.5, max_new_tokens=12)
        return await asyncio.gather(
            engine.generate(PROMPTS[0], hot, greedy=True, seed=1),
            engine.generate(PROMPTS[1], hot, seed=2),
            engine.generate(PROMPTS[2], cold, seed=3),
        )

    greedy, hot, cold = with_engine(body)
    with torch.no_grad():
        ids = list(PROMPTS[0])
        for token in greedy.tokens:
            assert token == int(llama()(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    close_to(hot.logprobs, forward_logprobs(llama(), PROMPTS[1], hot.tokens, 2.0))
    close_to(cold.logprobs, forward_logprobs(llama(), PROMPTS[2], cold.tokens, 0.5))


def test_a_request_samples_the_same_whatever_runs_beside_it():
    sampling = Sampling(max_new_tokens=16)

    async def alone(engine):
        return await engine.generate(PROMPTS[0], sampling, seed=7)

    async def crowded(engine):
        many = [engine.generate(PROMPTS[i % 4], sampling, seed=i) for i in range(12)]
        return (await asyncio.gather(engine.generate(PROMPTS[0], sampling, seed=7), *many))[0]

    assert with_engine(alone).tokens == with_engine(crowded).tokens


def test_survivors_are_returned_and_the_log_probability_is_renormalised_over_them():
    """Field report 15: the sampler renormalises over what top_p and top_k keep."""
    sampling = Sampling(top_p=0.8, top_k=10, max_new_tokens=12)

    async def body(engine):
        return await engine.generate(PROMPTS[0], sampling, seed=3)

    done = with_engine(body)
    assert len(done.survivors) == len(done.tokens)
    with torch.no_grad():
        logits = llama()(torch.tensor([PROMPTS[0] + done.tokens])).logits[0]
    for i, (token, kept) in enumerate(zip(done.tokens, done.survivors, strict=True)):
        row = logits[len(PROMPTS[0]) + i - 1]
        assert token in kept and 1 <= len(kept) <= 10
        expected = row[torch.tensor(kept)].log_softmax(-1)[kept.index(token)]
        close_to(done.logprobs[i], expected)


def test_stop_reasons():
    async def body(engine):
        free = Sampling(max_new_tokens=500)
        short = Sampling(max_new_tokens=3)
        done = await asyncio.gather(
            *(engine.generate(PROMPTS[0], free, seed=i) for i in range(8)),
            engine.generate([3] * 90, free, seed=1),
            engine.generate(PROMPTS[2], short, seed=2),
        )
        with pytest.raises(EngineFault, match="no room in a context of 96"):
            await engine.generate([3] * 96, free)
        return done

    for done in with_engine(body):
        match done.stop:
            case "eos":
                assert done.tokens[-1] == END
            case "length":
                assert len(done.tokens) == 3 and END not in done.tokens
            case "context":
                assert len(done.tokens) in (6, 93) and END not in done.tokens
        assert END not in done.tokens[:-1]


def test_both_ends_of_the_context_are_named():
    async def body(engine):
        free = Sampling(max_new_tokens=500)
        return await engine.generate([3] * 90, free, seed=0), await engine.generate([3], Sampling(max_new_tokens=4))

    full, short = with_engine(body, ends=())
    assert (full.stop, len(full.tokens)) == ("context", 6)
    assert (short.stop, len(short.tokens)) == ("length", 4)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_an_update_in_flight(keep_cache):
    """Recomputed, tokens after the switch are those of the new weights, before it of the old.

    Field report 10: every token carries the version that sampled it. Field report 34: 16 in flight, a version
    bump aborts none of them. With the cache kept, tokens carry the oldest version in it.
    """
    sampling = Sampling(max_new_tokens=60)
    drafts = [Draft() for _ in range(16)]

    async def body(engine):
        running = [
            asyncio.create_task(engine.generate(PROMPTS[i % 4], sampling, seed=i, draft=draft))
            for i, draft in enumerate(drafts)
        ]
        await until(lambda: all(len(draft.tokens) >= 4 for draft in drafts))
        await engine.update(reader(weights_of(llama(1), 1)), keep_cache=keep_cache)
        return await asyncio.gather(*running)

    finished = with_engine(body, ends=())
    old, new = llama(0), llama(1)
    for i, done in enumerate(finished):
        assert len(done.tokens) == 60 and sum(count for _, count in done.versions) == 60
        before, after = (forward_logprobs(model, PROMPTS[i % 4], done.tokens) for model in (old, new))
        if keep_cache:
            assert done.versions == [(0, 60)]
            continue
        (first, cut), (second, _) = done.versions
        assert (first, second) == (0, 1) and 4 <= cut < 60
        measured = torch.tensor(done.logprobs)
        torch.testing.assert_close(measured[:cut], before[:cut], atol=1e-4, rtol=0)
        torch.testing.assert_close(measured[cut:], after[cut:], atol=1e-4, rtol=0)


def test_versions_over_several_updates_cover_every_token():
    draft = Draft()

    async def body(engine):
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_new_tokens=80), draft=draft))
        for version in (1, 2, 5):
            seen = len(draft.tokens)
            await until(lambda seen=seen: len(draft.tokens) > seen + 2)
            assert draft.oldest_version == 0
            await engine.update(reader(weights_of(llama(version), version)))
        return await running

    done = with_engine(body, ends=())
    assert [version for version, _ in done.versions] == [0, 1, 2, 5]
    trajectory = SimpleNamespace(spans=done.versions)
    versions = token_versions(trajectory)
    for version in (0, 1, 2, 5):
        at = torch.from_numpy(versions == version)
        expected = forward_logprobs(llama(version), PROMPTS[0], done.tokens)
        close_to(torch.tensor(done.logprobs)[at].tolist(), expected[at])


def test_no_old_keys_and_values_after_an_update():
    """Field report 32, the rollout's part: the same prompt before and after has no hit across versions."""

    async def body(engine):
        sampling = Sampling(max_new_tokens=10)
        await engine.generate([3] * 40, sampling, seed=0)
        await engine.update(reader(weights_of(llama(1), 1)))
        return await engine.generate([3] * 40, sampling, seed=0)

    done = with_engine(body)
    close_to(done.logprobs, forward_logprobs(llama(1), [3] * 40, done.tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_after_an_update_the_live_parameters_hash_equal_to_the_trainers(tied):
    """Field reports 28 and 29: every name is covered, tied and untied, and the logits are the trainer's."""
    trainer = llama(3, tied=tied)

    async def body(engine):
        await engine.update(reader(weights_of(trainer, 4)))
        done = await engine.generate(PROMPTS[1], Sampling(max_new_tokens=10), seed=1)
        return engine.version, engine.checksums(), done

    async def main():
        engine = TransformersEngine(llama(0, tied=tied), [END], Settings())
        try:
            return await body(engine)
        finally:
            await engine.close()

    version, checksums, done = asyncio.run(main())
    assert version == 4
    assert checksums == {name: checksum(p) for name, p in trainer.named_parameters()}
    assert ("lm_head.weight" in checksums) is not tied
    close_to(done.logprobs, forward_logprobs(trainer, PROMPTS[1], done.tokens))


def test_weights_that_do_not_fit_leave_the_old_ones():
    """Field report 35, the rollout's part: a version that cannot be loaded changes nothing."""
    good = weights_of(llama(1), 1)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = Given(1, {n: t for n, t in good.named.items() if n != name})
    shaped = Given(1, good.named | {name: good.named[name][:-1]})
    unknown = Given(1, good.named | {"model.extra": torch.zeros(2)})
    untied = Given(1, good.named | {"lm_head.weight": torch.zeros(40, 32)})
    redundant = Given(1, good.named | {"lm_head.weight": good.named["model.embed_tokens.weight"].clone()})

    async def body(engine):
        before = engine.checksums()
        for wrong, message in [
            (missing, "up_proj.weight is not among them"),
            (shaped, r"up_proj.weight is \[63, 32\], the model's \[64, 32\]"),
            (unknown, "has no model.extra"),
            (untied, "differ, and the model ties them"),
        ]:
            with pytest.raises(PublicationError, match=message):
                await engine.update(reader(wrong))
            assert engine.version == 0 and engine.checksums() == before
        await engine.generate(PROMPTS[0], Sampling(max_new_tokens=3))
        await engine.update(reader(redundant))  # equal copies of a tied tensor are no error
        assert engine.version == 1

    with_engine(body)


def test_weights_taken_back_while_read_are_read_again_before_sampling_goes_on():
    async def body(engine):
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_new_tokens=60), seed=2))
        await asyncio.sleep(0.05)
        await engine.update(reader(weights_of(llama(1), 1), weights_of(llama(2), 2)))
        return await running

    done = with_engine(body, ends=())
    assert {version for version, _ in done.versions} <= {0, 2}


def test_weights_given_up_halfway_end_the_engine():
    async def body(engine):
        async def read(apply):
            await apply(weights_of(llama(1), 1))
            raise ConnectionError("relay gone")

        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_new_tokens=90)))
        await asyncio.sleep(0.01)
        with pytest.raises(ConnectionError):
            await engine.update(read)
        with pytest.raises(EngineDied, match="given up"):
            await running

    with_engine(body, ends=())


def test_cancelling_a_request_frees_its_place():
    async def body(engine):
        tasks = [
            asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_new_tokens=90), seed=i)) for i in range(4)
        ]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        scheduler = engine._manager.batch_processor.scheduler
        await until(lambda: not scheduler.active_requests and not scheduler.waiting_requests)
        done = await engine.generate(PROMPTS[1], Sampling(max_new_tokens=5), seed=1)
        close_to(done.logprobs, forward_logprobs(llama(), PROMPTS[1], done.tokens))

    with_engine(body, ends=())


def test_a_generation_thread_that_dies_fails_every_request():
    async def body(engine):
        def broken(scores, output_ids):
            raise RuntimeError("out of memory")

        engine._manager.batch_processor.model_runner._sample = broken
        results = await asyncio.gather(
            *(engine.generate(p, Sampling(max_new_tokens=90)) for p in PROMPTS), return_exceptions=True
        )
        assert all(isinstance(r, EngineDied) for r in results), results
        assert "out of memory" in str(results[0])
        with pytest.raises(EngineDied):
            await engine.generate(PROMPTS[0], Sampling())
        with pytest.raises((EngineDied, RuntimeError)):
            await engine.update(reader(weights_of(llama(1), 1)))

    with_engine(body)


def test_weights_that_are_not_finite_are_an_error_not_a_sample():
    async def body(engine):
        broken = weights_of(llama(1), 1)
        broken.named["model.norm.weight"] = torch.full((32,), torch.nan)
        await engine.update(reader(broken))
        with pytest.raises(EngineDied, match="not finite"):
            await engine.generate(PROMPTS[0], Sampling())

    with_engine(body)


def test_a_full_cache_delays_requests_but_changes_none():
    async def body(engine):
        sampling = Sampling(max_new_tokens=40)
        return await asyncio.gather(*(engine.generate(PROMPTS[0], sampling, seed=i) for i in range(6)))

    for done in with_engine(body, ends=(), num_blocks=12, page_size=8):
        assert len(done.tokens) == 40
        close_to(done.logprobs, forward_logprobs(llama(), PROMPTS[0], done.tokens))


def count_prompt_tokens(model):
    """Wraps `model` so that the list returned grows by the tokens of every forward pass."""
    seen, forward = [], model.forward

    def counted(input_ids, *args, **kwargs):
        seen.append(input_ids.numel())
        return forward(input_ids, *args, **kwargs)

    model.forward = counted
    return seen


LONG = [3 + i % 30 for i in range(70)]  # four whole pages of 16, and 6 tokens


def test_a_group_computes_its_prompt_once():
    model = llama()
    seen = count_prompt_tokens(model)

    async def body(engine):
        await asyncio.gather(*(engine.generate(LONG, Sampling(max_new_tokens=4), seed=k) for k in range(8)))

    with_engine(body, model=model, ends=(), page_size=16)
    assert sum(seen) <= 70 + 7 * 6 + 8 * 3  # 6 tokens of the prompt are in no whole page; 3 are decoded by each


def test_no_page_of_older_weights_serves_a_new_prompt():
    # Field report 32: the same prompt before and after an update.
    newer = llama(1)

    async def body(engine):
        sampling = Sampling(max_new_tokens=12)
        await engine.generate(LONG, sampling, greedy=True)
        stays = asyncio.create_task(engine.generate(LONG, Sampling(max_new_tokens=20), seed=3))
        while not engine._requests:
            await asyncio.sleep(0)
        await engine.update(reader(weights_of(newer, 1)), keep_cache=True)
        return await engine.generate(LONG, sampling, greedy=True), await stays

    for _ in range(3):
        after, _stays = with_engine(body, ends=(), page_size=16)
        with torch.no_grad():
            logprobs = newer(torch.tensor([LONG + after.tokens])).logits[0].log_softmax(-1)
        expected = [logprobs[len(LONG) - 1 + i, t].item() for i, t in enumerate(after.tokens)]
        assert after.logprobs == pytest.approx(expected, abs=1e-4)
        assert after.versions == [(1, 12)]


def test_who_waits_for_a_prompt_goes_on_when_the_first_is_cancelled():
    async def body(engine):
        first = asyncio.create_task(engine.generate(LONG, Sampling(max_new_tokens=4), seed=0))
        rest = [asyncio.create_task(engine.generate(LONG, Sampling(max_new_tokens=4), seed=k)) for k in (1, 2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.gather(*rest)

    assert [len(c.tokens) for c in with_engine(body, ends=(), page_size=16)] == [4, 4]


@pytest.mark.parametrize("tied", [True, False])
def test_asleep_it_holds_no_cache_and_awake_it_samples_as_before(tied):
    sampling, model = Sampling(max_new_tokens=12), llama(tied=tied)

    async def body(engine):
        async def sample():
            made = await asyncio.gather(*(engine.generate(p, sampling, seed=k) for k, p in enumerate(PROMPTS)))
            return [one.tokens for one in made]

        before, parameters, sums = await sample(), list(model.parameters()), engine.checksums()
        places = [p.data_ptr() for p in parameters]
        await engine.sleep()
        assert engine._cache.cache_tensor.untyped_storage().nbytes() == 0
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], sampling, seed=0))
        await asyncio.sleep(0.3)  # the generation thread goes round meanwhile
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).tokens == before[0]
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        assert [p.data_ptr() for p in parameters] != places
        assert engine.checksums() == sums
        assert await sample() == before
        await engine.update(reader(weights_of(llama(7, tied=tied), 1)))  # reaches the weights where they are now
        await engine.sleep()
        await engine.wake()
        after, other = await engine.generate(PROMPTS[0], sampling), llama(7, tied=tied)
        close_to(after.logprobs, forward_logprobs(other, PROMPTS[0], after.tokens))

    with_engine(body, model=model)


def test_it_can_be_closed_asleep():
    async def body(engine):
        await engine.sleep()

    with_engine(body)
