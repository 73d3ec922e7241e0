"""Adapters in the real vLLM, CPU build: `make test-vllm`, in an environment of its own, which has no peft."""

import asyncio
import copy

import pytest
import torch

from async_rl.config.schema import LoRA, Sampling
from async_rl.errors import PublicationError, UserError
from async_rl.protocol.weight_sync import LoRAInfo
from async_rl.services.rollout.engine import Draft
from async_rl.services.rollout.live_adapters import merged
from tests.engines.test_vllm import PROMPTS, Bench, Given, close_to, llama, under

pytestmark = pytest.mark.vllm

RANK, ALPHA = 4, 8.0
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
BASE = llama(0)


class Adapters:
    """Adapters drawn from `seed`, for `targets`; B is not zero, so that they change what is sampled."""

    def __init__(self, seed, targets=TARGETS, rank=RANK):
        generator = torch.Generator().manual_seed(seed)
        self.info, self.tensors = LoRAInfo(rank, ALPHA, targets), {}
        for name, weight in BASE.named_parameters():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in targets:
                out, into = weight.shape
                self.tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, into, generator=generator)
                self.tensors[f"base_model.model.{layer}.lora_B.weight"] = (
                    torch.randn(out, rank, generator=generator) / 8
                )

    def state_dict(self, **_):
        return self.tensors

    def on_base(self):
        """The base with these adapters added to its weights."""
        model = copy.deepcopy(BASE)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                a = self.tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
                if a is not None:
                    b = self.tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
                    weight.copy_(merged(weight, a, b, ALPHA / self.info.rank))
        return model


class LoRABench(Bench):
    def __init__(self, folder):
        super().__init__(folder, BASE, lora=LoRA(rank=RANK, alpha=ALPHA))

    async def update(self, adapters, *, keep_cache=False):
        return await super().update(adapters, lora=adapters.info, keep_cache=keep_cache)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = LoRABench(tmp_path_factory.mktemp("vllm"))
    yield made
    made.run(made.engine.close())
    made.runner.close()


def test_lora_every_request_samples_the_newest_adapter_and_none_the_base(bench):
    """Field report 31."""

    async def work():
        await bench.update(Adapters(1))
        before = await bench.sample()
        version = await bench.update(Adapters(2))
        return before, await bench.sample(), version

    before, after, version = bench.run(work())
    for prompt, old, new in zip(PROMPTS, before, after, strict=True):
        close_to(old.logprobs, under(Adapters(1).on_base(), prompt, old.tokens), 1e-3)
        close_to(new.logprobs, under(Adapters(2).on_base(), prompt, new.tokens), 1e-3)
        assert (torch.tensor(new.logprobs) - under(BASE, prompt, new.tokens)).abs().max() > 0.1
        assert [v for v, _ in new.versions] == [version]


def test_lora_requests_in_flight_go_on_under_the_new_adapter_which_none_of_them_loses(bench):
    """Field report 31: an adapter is never unloaded while a request names it, and no old one stays."""

    async def work():
        versions = [await bench.update(Adapters(3))]
        drafts = [Draft() for _ in range(16)]
        sampling = Sampling(max_new_tokens=300)
        tasks = [
            asyncio.create_task(bench.engine.generate(PROMPTS[k % 4], sampling, seed=k, draft=draft))
            for k, draft in enumerate(drafts)
        ]
        for seed, enough in ((4, 20), (5, 60)):
            while not any(len(draft.tokens) > enough for draft in drafts) and not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            versions.append(await bench.update(Adapters(seed)))
        done = await asyncio.gather(*tasks)
        return versions, done, await bench.engine._engine.list_loras()

    versions, done, loaded = bench.run(work())
    models = {version: Adapters(seed).on_base() for version, seed in zip(versions, (3, 4, 5), strict=True)}
    assert max(len(made.versions) for made in done) >= 2
    for k, made in enumerate(done):
        at = 0
        for version, count in made.versions:
            expected = under(models[version], PROMPTS[k % 4], made.tokens)[at : at + count]
            close_to(made.logprobs[at : at + count], expected, 1e-3)
            at += count
    assert set(loaded) == {1}
    assert not list(bench.folder.glob("async-rl-vllm-*"))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (Adapters(7, rank=8), "rank 4"),
        (BASE, "no adapter's"),
    ],
    ids=["another rank", "a whole model"],
)
def test_lora_adapters_that_do_not_fit_leave_the_old_ones(bench, wrong, problem):
    async def work():
        version = await bench.update(Adapters(6))

        async def read(apply):
            await apply(Given(bench.folder, wrong, version + 1000, Adapters(6).info))

        with pytest.raises(PublicationError, match=problem):
            await bench.engine.update(read)
        return version, await bench.sample()

    version, done = bench.run(work())
    for prompt, made in zip(PROMPTS, done, strict=True):
        assert {v for v, _ in made.versions} == {version}
        close_to(made.logprobs, under(Adapters(6).on_base(), prompt, made.tokens), 1e-3)


def test_lora_of_a_rank_that_vllm_has_no_room_for_is_one_line():
    from async_rl.services.rollout.vllm_engine import lora_rank

    assert [lora_rank(rank) for rank in (1, 2, 8, 17, 512)] == [1, 8, 8, 32, 512]
    with pytest.raises(UserError, match=r"model.lora.rank = 513: vllm takes 512 at most"):
        lora_rank(513)
