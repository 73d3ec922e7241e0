"""Ranks over gloo: one denominator, one gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[4])
import torch
torch.set_num_threads(1)
from trainer_material import configuration, random_samples, sample, tiny_llama, tiny_qwen3, trajectory
from async_rl.algorithms.aggregation import token_mean, weighted_sum
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.ranks import join

def sums(role):
    parameters = [p.detach() for p in role.model.parameters()]
    return [float((p.full_tensor() if hasattr(p, "full_tensor") else p).abs().sum()) for p in parameters]

rank, size = int(sys.argv[1]), int(sys.argv[2])
trainer = {"learning_rate": 0.01, "ranks": size, "micro_batch_tokens": 24, **json.loads(sys.argv[5])}
config = configuration(trainer=trainer)
ranks = join(config.trainer, rank, torch.distributed.FileStore(sys.argv[3], size))
objective = Objective.of(config)
both = [sample(trajectory([1], [2] * count)) for count in (2, 6)]
totals = objective.totals(both)
losses = torch.full((len(both[min(rank, 1)].action),), 1.0 if rank == 0 else 0.0)
weights = token_mean(torch.ones_like(losses), torch.zeros(len(losses)), 1, totals, 1)
mean = float(ranks.sum_(weighted_sum(losses, weights)))
policy = Policy(tiny_llama(), config, ranks)
for seed in range(3):
    update = policy.update(random_samples(5, seed, silent=(0, 2, 4) if seed == 1 else ()), objective)
ahead = configuration(algorithm={
    "loss": {"kind": "clip_cov", "share": 0.2, "low": 0.0, "high": 9.0},
    "correction": {"weights": {"normalize": True}, "rejections": [{"kind": "m2po", "tau": 1.0}]},
    "kl": {"coefficient": 0.1},
}, trainer=trainer)
other = Policy(tiny_qwen3(1), ahead, ranks)
reference = Network(tiny_llama(2), ahead, ranks)
for seed in range(3):
    samples = random_samples(5, seed)
    parts = torch.split(reference.logprobs(samples), [len(s.action) for s in samples])
    samples = [dataclasses.replace(s, reference=part) for s, part in zip(samples, parts, strict=True)]
    looked = other.update(samples, Objective.of(ahead, 0.1))
print(json.dumps({
    "rejected": looked.rejected,
    "clipped": looked.clipped,
    "reference_kl": looked.reference_kl,
    "weight": looked.weight,
    "other_weights": sums(other),
    "mean": mean,
    "loss": update.loss,
    "norm": update.gradient_norm,
    "tokens": update.tokens,
    "k3": update.mismatch.k3,
    "ratio": update.mismatch.max_ratio,
    "weights": sums(policy),
}))
"""


def start(rank, size, store, **trainer):
    unit = Path(__file__).parent.parent / "unit"
    command = [sys.executable, "-c", RANK, str(rank), str(size), str(store), str(unit), json.dumps(trainer)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(processes):
    try:
        return [json.loads(p.communicate(timeout=90)[0].splitlines()[-1]) for p in processes]
    finally:
        for process in processes:
            process.kill()


LOOKED = ("loss", "norm", "tokens", "k3", "ratio", "weights", "rejected", "clipped", "reference_kl", "weight")


def together(tmp_path, size, **trainer):
    """What each of `size` ranks found."""
    store = tmp_path / f"store-{size}-{len(list(tmp_path.iterdir()))}"
    return finish([start(rank, size, store, **trainer) for rank in range(size)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds, whose model is whole."""
    (found,) = together(tmp_path_factory.mktemp("alone"), 1)
    assert found["rejected"] and found["clipped"]
    return found


@pytest.mark.parametrize(
    ("size", "sequence", "tensor"),
    [(2, 1, 1), (4, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1), (2, 1, 2), (4, 1, 2), (4, 2, 2)],
)
def test_ranks_make_the_update_that_one_makes(tmp_path, alone, size, sequence, tensor):
    """Field report 18: rank A two tokens of loss 1, rank B six of loss 0: 0.25 globally, not 0.5. Ranks that
    share sequences do not count them twice."""
    first, *others = together(tmp_path, size, sequence_parallel=sequence, tensor_parallel=tensor)
    for other in others:
        assert first["mean"] == other["mean"] == 0.25
        assert first["weights"] == other["weights"] and first["other_weights"] == other["other_weights"]
    for figure in (*LOOKED, "other_weights"):
        assert first[figure] == pytest.approx(alone[figure], abs=1e-9), figure


@pytest.mark.parametrize(
    ("size", "trainer"),
    [
        (1, {"recompute": True}),
        (1, {"offload": True}),
        (2, {"recompute": True, "offload": True}),
        (2, {"recompute": True, "logits_bytes": 1}),
        (2, {"recompute": True, "logits_bytes": 1, "sequence_parallel": 2}),
    ],
)
def test_what_saves_memory_changes_no_figure(tmp_path, alone, size, trainer):
    for found in together(tmp_path, size, **trainer):
        for figure in (*LOOKED, "other_weights"):
            assert found[figure] == pytest.approx(alone[figure], abs=1e-9), figure
