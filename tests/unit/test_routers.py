"""Routers of every family that is known: from a choice and the logits follow the weights that they give themselves."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers.models
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.errors import UserError
from async_rl.models.routers import KNOWN, experts, layout, routers, weights_of
from tests.unit.moe_material import EXPERTS, LAYERS, PER_TOKEN, tiny_moe

SIZES = {"hidden_size": 16, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2, "norm_topk_prob": True}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def router_class(name):
    """The class of this name, in whichever of transformers' models it is."""
    (folder,) = map(Path, transformers.models.__path__)
    (file,) = (f for f in folder.glob("*/modeling_*.py") if f"\nclass {name}(" in f.read_text(encoding="utf-8"))
    return getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)


class AnyConfig:
    """What any of the families reads of its configuration."""

    def __init__(self, norm):
        for key, value in SIZES.items():
            setattr(self, key, value)
        for key in COUNTS:
            setattr(self, key, 8)
        self.norm_topk_prob = norm
        self.routed_scaling_factor, self.router_jitter_noise = 2.5, 0.0


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_weights_follow_from_logits_and_choice_as_the_router_has_them(name, norm):
    torch.manual_seed(0)
    kind = router_class(name)
    assert list(inspect.signature(kind.forward).parameters) == ["self", "hidden_states"]
    router = kind(AnyConfig(norm))
    for tensor in [*router.parameters(), *router.buffers()]:
        torch.nn.init.normal_(tensor)
    with torch.no_grad():
        logits, weights, chosen = router(torch.randn(50, 16))
    assert experts(router) == logits.shape[1] == 8 and chosen.shape == (50, 3)
    torch.testing.assert_close(weights_of(router, logits, chosen).to(weights.dtype), weights)


def test_the_routers_of_a_model_are_found_in_the_order_of_its_layers():
    found = routers(tiny_moe())
    assert list(found) == ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
    assert {experts(router) for router in found.values()} == {EXPERTS}


def test_where_a_model_has_experts_is_known_without_its_weights(tmp_path):
    tiny_moe().config.save_pretrained(tmp_path)
    assert layout(tmp_path) == (LAYERS, [0, 2], EXPERTS, PER_TOKEN)


def test_a_model_without_experts_is_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2))
    with pytest.raises(UserError, match=r"trainer.router_replay = true: .* LlamaForCausalLM .*: it has no experts"):
        routers(model)


def test_routers_of_another_form_are_refused_by_name():
    class OddRouter(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(OddRouter(2, 2))
    with pytest.raises(UserError, match="OddRouter, are of no known form"):
        routers(model)
