"""A small mixture of experts, and what its routers choose in a plain forward pass."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_rl.models.routers import routers

LAYERS, EXPERTS, PER_TOKEN = 3, 6, 2  # the second layer has no experts
VOCABULARY = 40


def tiny_moe(seed=0, dtype=torch.float32, *, context=96):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=context,
        initializer_range=0.3,  # distributions worth sampling from
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"  # the others have no float64
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


class Watched:
    """Within it, what the routers of `model` chose: one [T, layers, k] for each forward pass."""

    def __init__(self, model):
        self._routers = list(routers(model).values())
        self._rows = []

    def __enter__(self):
        self._hooks = [
            router.register_forward_hook(lambda _module, _args, output: self._rows.append(output[2]))
            for router in self._routers
        ]
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    @property
    def passes(self):
        count = len(self._routers)
        return [torch.stack(self._rows[at : at + count], dim=1) for at in range(0, len(self._rows), count)]


def plain_routing(model, tokens):
    """[T, layers, k] of one sequence by itself."""
    with torch.no_grad(), Watched(model) as watched:
        model(input_ids=torch.tensor([tokens]))
    return watched.passes[0]
