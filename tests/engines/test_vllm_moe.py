"""The real vLLM with a mixture of experts: weights that are published as stacks become its own."""

import asyncio

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_rl.config.schema import Model, Sampling, VLLMEngine
from tests.engines.test_vllm import END, PROMPTS, Given, close_to, under

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


def test_log_probabilities_are_those_of_the_newest_weights(tmp_path):
    from async_rl.services.rollout.vllm_engine import VLLMEngine as Engine

    mixture(0).save_pretrained(tmp_path / "model")

    async def main():
        engine = await Engine.start(Model(path=str(tmp_path / "model")), [END], VLLMEngine(kv_cache_bytes=2**26))
        try:
            for version in (1, 2):
                model = mixture(version)
                given = Given(tmp_path, model, version)

                async def read(apply, given=given):
                    await apply(given)
                    return given.version

                async with asyncio.timeout(60):
                    await engine.update(read)
                    sampling = Sampling(max_new_tokens=12)
                    done = await asyncio.gather(*(engine.generate(p, sampling, seed=i) for i, p in enumerate(PROMPTS)))
                for prompt, one in zip(PROMPTS, done, strict=True):
                    close_to(one.logprobs, under(model, prompt, one.tokens))
        finally:
            await engine.close()

    asyncio.run(main())
