"""Logits made in parts: what is read of them, and every gradient, is that of logits that stand whole."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from async_rl.services.trainer.critic import Critic, value_model
from async_rl.services.trainer.logits import logits_of
from async_rl.services.trainer.network import sum_pi_squared
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.packing import pack
from async_rl.services.trainer.policy import Policy
from tests.unit.trainer_material import VOCABULARY, configuration, random_samples, tiny_llama

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 1.0,
}


def gemma():
    """Caps its logits behind the head."""
    config = Gemma2Config(**SMALL, head_dim=4, final_logit_softcapping=2.0, attn_logit_softcapping=None)
    return Gemma2ForCausalLM(config)


def granite():
    """Scales its logits behind the head."""
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0))


def mixture():
    """Gives its router's logits, too."""
    config = Qwen3MoeConfig(**SMALL, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    config._experts_implementation = "eager"  # the grouped product has no float64
    return Qwen3MoeForCausalLM(config)


def model_of(make):
    torch.manual_seed(0)
    return make().double().eval()


def trained(make, rows, **algorithm):
    """The gradients of one update whose logits stand `rows` at a time, the update, and the most that stood."""
    settings = {"learning_rate": 0.01, "logits_bytes": rows * 4 * VOCABULARY}
    config = configuration(trainer=settings, algorithm=algorithm)
    policy = Policy(model_of(make), config)
    gradients, stood = {}, []

    def remember(*_):
        gradients.update({name: p.grad.clone() for name, p in policy.model.named_parameters()})

    policy._optimizer.register_step_pre_hook(remember)
    policy.model.get_output_embeddings().register_forward_hook(lambda _m, _a, out: stood.append(out.shape[-2]))
    update = policy.update(random_samples(7), Objective.of(config))
    return gradients, update, max(stood)


@pytest.mark.parametrize("make", [tiny_llama, gemma, granite, mixture])
@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_are_those_of_whole_logits(make, rows):
    whole, update, stood = trained(make, 1000, entropy=0.01)
    assert stood > 4
    parts, again, stood = trained(make, rows, entropy=0.01)
    assert stood == rows
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-12, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in whole.values())
    for figure in ("loss", "entropy", "gradient_norm"):
        assert getattr(again, figure) == pytest.approx(getattr(update, figure), rel=1e-9)


def test_other_figures_are_those_of_whole_logits():
    samples, found = random_samples(5), []
    for rows in (1000, 3):
        config = configuration(trainer={"learning_rate": 0.01, "logits_bytes": rows * 4 * VOCABULARY})
        policy = Policy(tiny_llama(), config)

        def squares(_, logits):
            return logits.read(lambda z: sum_pi_squared(z, None, 1.0))

        critic = Critic(value_model(tiny_llama(1)), config)
        torch.nn.init.normal_(critic.model.get_output_embeddings().weight)
        found.append((policy.logprobs(samples), policy.read(samples, squares, 1)[0], critic.values(samples)))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


def test_a_model_is_as_it_was_where_reading_fails():
    model, made = tiny_llama(), pack(random_samples(5))
    policy = Policy(model, configuration(trainer={"learning_rate": 0.01, "logits_bytes": 1}))

    def fails(_):
        raise RuntimeError("of the reader")

    with pytest.raises(RuntimeError, match="of the reader"):
        policy.logits(made).read(fails)
    with pytest.raises(TypeError, match="expand"):
        logits_of(model, {"input_ids": made.input_ids}, made.predict, 1)
    assert "forward" not in vars(model.base_model) and not model.base_model._forward_hooks
    assert len(policy.of_tokens(made, policy.logits(made))[0]) == len(made.predict)
