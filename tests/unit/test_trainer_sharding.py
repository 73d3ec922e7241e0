"""What does without other processes of a model in parts."""

import pytest
import torch

from async_rl.errors import UserError
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.packing import pack, share_of_packs
from async_rl.services.trainer.ranks import Ranks, exchange_failed, join
from async_rl.services.trainer.sharding import layers
from async_rl.services.trainer.team import Pulses
from async_rl.services.trainer.tensor import planned, require_divisible
from tests.unit.moe_material import tiny_moe
from tests.unit.trainer_material import configuration, random_samples, tiny_llama, tiny_qwen3


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 2)])
def test_recomputation_passes_a_layer_again_in_the_backward_pass(recompute, times):
    model, passes = tiny_llama(), []
    network = Network(model, configuration(trainer={"recompute": recompute}))
    (first, _) = layers(model)
    first.input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    network.logits(pack(random_samples(3))).read(lambda z: (z.sum(-1),))[0].sum().backward()
    assert len(passes) == times


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_share_has_as_many_passes_and_every_sample_one(seed, shares):
    samples = random_samples(7, seed=seed)
    of_all = [share_of_packs(samples, share, shares, 24, 16) for share in range(shares)]
    assert len({len(packs) for packs in of_all}) == 1
    passed = sorted(tuple(p.targets.tolist()) for packs in of_all for p in packs if not p.idle)
    assert sum(map(len, passed)) == sum(len(sample.action) for sample in samples)
    assert all(not any(p.idle for p in packs) or packs[-1].idle for packs in of_all)
    assert [share_of_packs([], share, shares, 24, 16) for share in range(shares)] == [[]] * shares


def test_one_rank_has_its_models_whole_unless_settings_ask_for_parts():
    assert join(configuration().trainer, 0) == Ranks()


def test_a_device_without_a_way_to_exchange_is_refused():
    with pytest.raises(UserError, match=r"trainer\.device = 'meta'"):
        join(configuration(trainer={"device": "meta", "ranks": 2}).trainer, 0)


def test_a_plan_covers_the_layers_alone():
    plan = planned(tiny_qwen3())
    assert plan["model.layers.1.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert plan["model.layers.0.mlp.down_proj"] == "rowwise"
    assert not [name for name in plan if "embed" in name or "lm_head" in name]
    with pytest.raises(UserError, match=r"tensor_parallel = 3 does not divide .* one of \[1, 2\]"):
        require_divisible(tiny_qwen3(), 3)


def test_experts_are_not_cut():
    with pytest.raises(UserError, match="leave it at 1"):
        planned(tiny_moe())


def test_a_silent_rank_is_named_after_its_limit():
    pulses = Pulses(10.0)
    pulses.feel(3, b"1", 0.0)
    pulses.feel(3, b"2", 9.0)
    pulses.feel(3, b"2", 18.0)
    with pytest.raises(Exception, match=r"a sign of life of rank 3 did not come within 10 s \(trainer\.collective_s"):
        pulses.feel(3, b"2", 20.0)


def test_failures_of_exchanges_are_told_from_others():
    assert exchange_failed(torch.distributed.DistBackendError("NCCL error"))
    assert exchange_failed(RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not exchange_failed(RuntimeError("CUDA out of memory"))
