"""Makes losses.npz: random updates, and what verl 0.9.1, AReaL 1.0.4 and TRL 1.16 say of them.

Run in an environment that has the three (AReaL and TRL without their dependencies) and torch on a CPU; the tests
need none of them, they read the file:

    python tests/golden/make_losses.py

An array is named `<case>/<what>`, padded to [S, T] with a mask; `<case>/<loss>/value` and `/gradient` (with respect
to the log-probabilities) are what the loss gives after its aggregation.
"""

import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.utils.functional import ppo_actor_loss_fn
from trl import GRPOTrainer
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

os.environ["CUDA_VISIBLE_DEVICES"] = ""
CASES, WIDTH = 24, 9
LOW, HIGH = 0.2, 0.28
VERL = {
    "ppo": "vanilla",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo",
    "sapo": "sapo",
    "reinforce": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gmpo": "geo_mean",
    "dro": "dro",
    "cispo": "cispo",
}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KLS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
REJECTIONS = {
    "token_k1": "0.7_1.5",
    "token_k2": 0.05,
    "token_k3": 0.05,
    "seq_sum_k1": "0.5_2.0",
    "seq_sum_k2": 0.3,
    "seq_sum_k3": 0.3,
    "seq_mean_k1": "0.8_1.25",
    "seq_mean_k2": 0.05,
    "seq_mean_k3": 0.05,
    "seq_max_k2": 0.2,
    "seq_max_k3": 0.2,
}


def case(number: int) -> dict[str, np.ndarray]:
    """Of every kind: small and large ratios, one advantage a sequence or one a token, zeros among them."""
    random = np.random.default_rng(number)
    count = int(random.integers(1, 8))
    mask = np.arange(WIDTH) < random.integers(1, WIDTH + 1, count)[:, None]
    old = -random.exponential(1.0, (count, WIDTH)) - 1e-3
    spread = (0.05, 0.5, 2.0)[number % 3]
    advantages = random.normal(size=(count, 1 if number % 2 else WIDTH)) * np.ones((1, WIDTH))
    advantages[random.random(count) < 0.2] = 0.0
    lp = np.minimum(old + random.normal(size=old.shape) * spread, -1e-4)
    return {
        "mask": mask,
        "old": old,
        "logprobs": lp,
        "behaviour": old + random.normal(size=old.shape) * spread,
        "advantages": advantages,
        "reference": lp + np.clip(random.normal(size=old.shape) * spread, -4, 2.5),  # k3 below its bound of 10
    }


def ask(lp: torch.Tensor, loss_of) -> dict[str, np.ndarray]:
    leaf = lp.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return {"value": loss.detach().numpy(), "gradient": leaf.grad.numpy()}


def actor(**settings) -> ActorConfig:
    policy_loss = PolicyLossConfig(
        dro_beta=0.3, clip_cov_ratio=1.0, clip_cov_lb=0.01, clip_cov_ub=5.0, kl_cov_ratio=0.25, ppo_kl_coef=0.7
    )
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        ppo_mini_batch_size=16,
        clip_ratio=LOW,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        policy_loss=policy_loss,
        **settings,
    )


def trl_loss(kind: str, given: dict[str, torch.Tensor], lp: torch.Tensor) -> torch.Tensor:
    """TRL's own `_compute_loss`, of a trainer that has nothing but what it reads."""
    mask = given["mask"].long()
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=False)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (lp, torch.zeros_like(lp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.04,
        loss_type=kind,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        model=SimpleNamespace(training=True),
        accelerator=same,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def answers(number: int) -> dict[str, np.ndarray]:
    arrays = case(number)
    given = {name: torch.from_numpy(value) for name, value in arrays.items()}
    mask, lp = given["mask"].double(), given["logprobs"]
    found: dict[str, np.ndarray] = dict(arrays)

    def put(name: str, made: dict[str, np.ndarray]) -> None:
        found.update({f"{name}/{what}": value for what, value in made.items()})

    for ours, theirs in VERL.items():
        function = core_algos.get_policy_loss_fn(theirs)
        mode = "seq-mean-token-mean" if ours in ("gspo", "sapo", "gmpo") else "token-mean"
        settings = actor() if not ours.startswith("dppo") else actor(clip_ratio_c=20.0)
        put(
            ours,
            ask(lp, lambda x, f=function, m=mode, c=settings: f(given["old"], x, given["advantages"], mask, m, c)[0]),
        )
    for mode in AGGREGATIONS:
        scale = {"loss_scale_factor": 12} if mode.endswith("norm") else {}
        values = given["advantages"]
        put(
            f"aggregation/{mode}",
            ask(lp, lambda x, v=values, m=mode, s=scale: core_algos.agg_loss(v * x, mask, m, **s)),
        )
    for kind in KLS:
        put(f"kl/{kind}", ask(lp, lambda x, k=kind: (core_algos.kl_penalty(x, given["reference"], k) * mask).sum()))
    log_r = given["old"] - given["behaviour"]
    for level in ("token", "sequence"):
        for threshold, normalize in ((2.0, False), ("0.5_2.0", False), (2.0, True)):
            weights, _ = compute_rollout_correction_weights(log_r, mask, level, threshold, normalize)
            found[f"weights/{level}/{threshold}/{normalize}"] = weights.numpy()
    for by, threshold in REJECTIONS.items():
        kept, _ = compute_rollout_rejection_mask(log_r, mask, by, threshold)
        found[f"rejection/{by}"] = kept.numpy().astype(bool)
    bypass = {
        "ppo_clip": RolloutCorrectionConfig.bypass_ppo_clip(),
        "reinforce": RolloutCorrectionConfig.bypass_pg_is(),
    }
    for kind, correction in bypass.items():
        settings = actor()
        object.__setattr__(settings.policy_loss, "rollout_correction", correction)
        function = core_algos.get_policy_loss_fn("bypass_mode")
        put(
            f"bypass/{kind}",
            ask(
                lp,
                lambda x, f=function, c=settings: f(given["behaviour"], x, given["advantages"], mask, "token-mean", c)[
                    0
                ],
            ),
        )
    decoupled = RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=2.0)
    put(
        "areal/decoupled",
        ask(
            lp,
            lambda x: ppo_actor_loss_fn(
                x,
                given["old"],
                given["behaviour"],
                given["advantages"],
                LOW,
                given["mask"],
                eps_clip_higher=HIGH,
                c_clip=3.0,
                rejection_sampling=decoupled,
            )[0],
        ),
    )
    for kind in ("grpo", "dapo", "dr_grpo"):
        put(f"trl/{kind}", ask(lp, lambda x, k=kind: trl_loss(k, given, x)))
    return {f"{number}/{name}": np.asarray(value) for name, value in found.items()}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    rollout_corr_helper.compute_is_metrics = lambda **_: {}  # divides by 0 where every weight is 0
    everything: dict[str, np.ndarray] = {}
    for number in range(CASES):
        everything |= answers(number)
    np.savez_compressed(Path(__file__).with_name("losses.npz"), **everything)


if __name__ == "__main__":
    main()
