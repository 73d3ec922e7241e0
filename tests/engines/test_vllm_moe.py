"""The real vLLM with a mixture of experts: weights that are published as stacks become its own."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engines.test_vllm import END, PROMPTS, Bench, close_to, under

pytestmark = pytest.mark.vllm


def mixture(seed):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=END,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, mixture(0))
    yield made
    made.run(made.engine.close())
    made.runner.close()


def test_log_probabilities_are_those_of_the_newest_weights(bench):
    async def work(seed):
        version = await bench.update(mixture(seed))
        return version, await bench.sample()

    for seed in (1, 2):
        version, done = bench.run(work(seed))
        for prompt, made in zip(PROMPTS, done, strict=True):
            close_to(made.logprobs, under(mixture(seed), prompt, made.tokens))
            assert {v for v, _ in made.versions} == {version}
