"""Losses, aggregations, corrections and KL forms against what verl, AReaL and TRL give for the same tensors.

tests/golden/make_losses.py made the numbers. Deviations are marked where they are.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.algorithms.aggregation import Totals, weighted_sum
from async_rl.algorithms.corrections import importance_weights, rejected
from async_rl.algorithms.kl import penalty
from async_rl.algorithms.losses import log_ratio
from async_rl.algorithms.members import Tokens
from async_rl.algorithms.registry import AGGREGATIONS, LOSSES
from async_rl.config.algorithms import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    ClipCov,
    KLCov,
    Reinforce,
    Reject,
    Weights,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "losses.npz")
CASES = sorted({int(name.partition("/")[0]) for name in GOLDEN.files})
LOW, HIGH = 0.2, 0.28
SETTINGS = {
    "ppo": PPO(clip_low=LOW, clip_high=HIGH),
    "dppo_tv": DPPOTV(delta_low=LOW, delta_high=HIGH),
    "dppo_kl": DPPOKL(delta_low=LOW, delta_high=HIGH),
    "gspo": GSPO(clip_low=LOW, clip_high=HIGH),
    "sapo": SAPO(),
    "reinforce": Reinforce(),
    "clip_cov": ClipCov(clip_low=LOW, clip_high=HIGH, share=1.0, low=0.01, high=5.0),
    "kl_cov": KLCov(share=0.25, beta=0.7),
    "gmpo": GMPO(clip_low=LOW, clip_high=HIGH),
    "dro": DRO(beta=0.3),
    "cispo": CISPO(clip_low=LOW, clip_high=HIGH),
}
each_case = pytest.mark.parametrize("case", CASES)


class Packed:
    """A case without its padding; `lp` carries the gradient."""

    def __init__(self, case):
        self.case = case
        self.mask = torch.from_numpy(GOLDEN[f"{case}/mask"])
        self.lp = self.flat("logprobs").clone().requires_grad_()
        lengths = self.mask.sum(1)
        self.sequences = len(lengths)
        self.sequence = torch.arange(self.sequences).repeat_interleave(lengths)
        self.loss = torch.ones(len(self.sequence), dtype=torch.bool)
        self.totals = Totals(int(lengths.sum()), self.sequences)

    def flat(self, name):
        return torch.from_numpy(GOLDEN[f"{self.case}/{name}"])[self.mask]

    def tokens(self, old="old", chosen=None):
        return Tokens(
            logprobs=self.lp,
            old=self.flat(old),
            behaviour=self.flat("behaviour"),
            advantages=self.flat("advantages"),
            loss=self.loss,
            sequence=self.sequence,
            sequences=self.sequences,
            chosen=chosen,
        )

    def aggregated(self, values, mode, horizon=1):
        weights = AGGREGATIONS[mode](self.loss.double(), self.sequence, self.sequences, self.totals, horizon)
        return weighted_sum(values, weights)

    def agrees(self, name, value):
        """The value and its gradient are those of `name`."""
        value.backward()
        assert value.item() == pytest.approx(float(GOLDEN[f"{self.case}/{name}/value"]), abs=1e-5, rel=1e-5)
        theirs = torch.from_numpy(GOLDEN[f"{self.case}/{name}/gradient"])
        assert not theirs[~self.mask].any()
        torch.testing.assert_close(self.lp.grad, theirs[self.mask], atol=1e-5, rtol=1e-5)


def test_there_are_enough_cases_and_of_every_kind():
    assert len(CASES) >= 20
    ratios = [np.exp(GOLDEN[f"{case}/logprobs"] - GOLDEN[f"{case}/old"]).max() for case in CASES]
    assert min(ratios) < 1.3 and max(ratios) > 5
    assert any((GOLDEN[f"{case}/advantages"] == 0).any() for case in CASES)
    assert len({GOLDEN[f"{case}/mask"].shape[0] for case in CASES}) > 4


@each_case
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_losses_of_verl(name, case):
    """* topr is not in verl; its own test is in test_algorithms_losses.py."""
    made, entry = Packed(case), LOSSES[name]
    chosen = None
    if entry.choose is not None:
        noise = torch.rand(len(made.lp), dtype=torch.float64)
        chosen = entry.choose(made.tokens(), SETTINGS[name], noise)
    loss = entry.evaluate(made.tokens(chosen=chosen), SETTINGS[name])
    made.agrees(name, made.aggregated(loss.values, entry.aggregation))


@each_case
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_aggregations_of_verl(mode, case):
    made = Packed(case)
    made.agrees(f"aggregation/{mode}", made.aggregated(made.flat("advantages") * made.lp, mode, horizon=12))


@each_case
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_kl_forms_of_verl(kind, case):
    made = Packed(case)
    made.agrees(f"kl/{kind}", penalty(made.lp, made.flat("reference"), kind).sum())


@each_case
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("2.0/False", {"cap": 2.0}),
        ("0.5_2.0/False", {"band": (0.5, 2.0)}),
        ("2.0/True", {"cap": 2.0, "normalize": True}),
    ],
)
def test_importance_weights_of_verl(level, name, settings, case):
    made = Packed(case)
    log_r = log_ratio(made.flat("old"), made.flat("behaviour"))
    ours = importance_weights(log_r, made.loss, made.sequence, made.sequences, Weights(level=level, **settings))
    torch.testing.assert_close(ours, made.flat(f"weights/{level}/{name}"), atol=1e-5, rtol=1e-5)


@each_case
@pytest.mark.parametrize(
    ("by", "low", "high"),
    [
        ("token_k1", 0.7, 1.5),
        ("token_k2", None, 0.05),
        ("token_k3", None, 0.05),
        ("seq_sum_k1", 0.5, 2.0),
        ("seq_sum_k2", None, 0.3),
        ("seq_sum_k3", None, 0.3),
        ("seq_mean_k1", 0.8, 1.25),
        ("seq_mean_k2", None, 0.05),
        ("seq_mean_k3", None, 0.05),
        ("seq_max_k2", None, 0.2),
        ("seq_max_k3", None, 0.2),
    ],
)
def test_rejections_of_verl(by, low, high, case):
    """* verl takes the bounds of k1 as ratios and its logarithms; ours are bounds of k1 itself."""
    made = Packed(case)
    bounds = {"max": high} if low is None else {"min": float(np.log(low)), "max": float(np.log(high))}
    log_r = log_ratio(made.flat("old"), made.flat("behaviour"))
    out = rejected(log_r, made.flat("advantages"), made.loss, made.sequence, made.sequences, Reject(by=by, **bounds))
    assert torch.equal(~out, made.flat(f"rejection/{by}"))


@each_case
def test_the_bypass_of_verl_is_the_behaviour_as_the_proximal_policy(case):
    made = Packed(case)
    ppo = LOSSES["ppo"].evaluate(made.tokens(old="behaviour"), SETTINGS["ppo"])
    made.agrees("bypass/ppo_clip", made.aggregated(ppo.values, "token-mean"))


@each_case
def test_the_bypass_of_verl_with_reinforce_weighs_sequences(case):
    """* verl's preset weighs whole sequences, by what the newest policy is from the sampler."""
    made = Packed(case)
    log_r = log_ratio(made.lp.detach(), made.flat("behaviour"))
    weights = importance_weights(log_r, made.loss, made.sequence, made.sequences, Weights(level="sequence", cap=2.0))
    loss = LOSSES["reinforce"].evaluate(made.tokens(), Reinforce())
    made.agrees("bypass/reinforce", made.aggregated(loss.values * weights, "token-mean"))


@each_case
def test_the_decoupled_loss_of_areal(case):
    """Clipped against the proximal policy, times the truncated weight of that one over the behaviour."""
    made = Packed(case)
    log_r = log_ratio(made.flat("old"), made.flat("behaviour"))
    weights = importance_weights(log_r, made.loss, made.sequence, made.sequences, Weights(cap=2.0))
    loss = LOSSES["ppo"].evaluate(made.tokens(), SETTINGS["ppo"])
    made.agrees("areal/decoupled", made.aggregated(loss.values * weights, "token-mean"))


@each_case
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("grpo", "seq-mean-token-mean"), ("dapo", "token-mean"), ("dr_grpo", "seq-mean-token-sum-norm")],
)
def test_the_grpo_loss_of_trl(kind, mode, case):
    """* without the dual clip, which TRL has not; its KL is k3, which ours and verl's bound by 10."""
    made = Packed(case)
    ppo = LOSSES["ppo"].evaluate(made.tokens(), PPO(clip_low=LOW, clip_high=HIGH, dual_clip=1e9))
    values = ppo.values + 0.04 * penalty(made.lp, made.flat("reference"), "k3")
    made.agrees(f"trl/{kind}", made.aggregated(values, mode, horizon=9))
