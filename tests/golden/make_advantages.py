"""Makes advantages.npz: random steps, and what verl 0.9.1's own functions say of them.

Run in an environment that has verl 0.9.1 and torch on a CPU; the tests need neither, they read the file:

    python tests/golden/make_advantages.py

An array is named `<case>/<what>`; members are [N], tokens [A] with the action tokens of all members one after the
other, as in async_rl/algorithms/members.py. verl pads: [N, T] with a response mask, in which tool output is a hole.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.protocol import DataProto
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo import core_algos

CASES = 36
GAMMA, LAM = 0.97, 0.9
KEYS, WEIGHTS = ["accuracy", "format"], [1.0, 0.25]


def case(number: int) -> dict[str, np.ndarray]:
    """Of every kind: outcomes of two values, of eighths, and continuous; tool output in every second case; groups of
    unequal size, a single member among them in every third; rewards at tokens in every fourth."""
    random = np.random.default_rng(number)
    singles = number % 12 == 11
    sizes = [1] * 6 if singles else [int(random.integers(2, 7)) for _ in range(3)] + [1] * (number % 3 == 0)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    members, width = len(groups), 14
    lengths = random.integers(1, width + 1, members)
    mask = np.arange(width) < lengths[:, None]
    if number % 2:
        mask &= random.random((members, width)) < 0.6
        mask[:, 0] = True  # a response begins with a token of the policy
    if mask.sum() < 2:
        mask[0, :2] = True
    ends = np.array([np.flatnonzero(row)[-1] for row in mask])
    outcome = [
        random.integers(0, 2, members).astype(float),
        random.integers(-4, 9, members) / 8.0,
        random.normal(size=members),
    ][number // 2 % 3]
    outcome[groups == 0] = 0.0 if number % 5 == 0 else outcome[groups == 0]  # a whole group of zeros
    at_tokens = np.where(mask, random.normal(size=mask.shape) * 0.05 * (number % 4 == 1), 0.0)
    at_tokens[np.arange(members), ends] = 0.0
    rewards = at_tokens.copy()
    rewards[np.arange(members), ends] += outcome
    old = -random.exponential(1.0, mask.shape)
    pi = np.exp(old)
    columns = {
        "values": random.normal(size=mask.shape),
        "old": old,
        "sum_pi_squared": pi**2 + (1 - pi) ** 2 * random.random(mask.shape),
        "weights": np.exp(random.normal(size=mask.shape) * 0.3).clip(max=2.0),
        "predicted": random.normal(size=mask.shape),
        "returns": random.normal(size=mask.shape),
    }
    components = {key: random.integers(0, 5, members) / 4.0 for key in KEYS}
    made = {
        "groups": groups,
        "group_size": np.array(1 if singles else 6),
        "lengths": mask.sum(1),
        "positions": np.nonzero(mask)[1],
        "outcome": outcome,
        "token_rewards": at_tokens[mask],
        "greedy": random.normal(size=len(sizes)).round(2),
        **{f"component/{key}": values for key, values in components.items()},
        **{name: values[mask] for name, values in columns.items()},
    }
    made |= {f"verl/{name}": values for name, values in answers(made, mask, rewards, columns, components).items()}
    return made


def answers(made, mask, rewards, columns, components) -> dict[str, np.ndarray]:
    tensor = {name: torch.from_numpy(values) for name, values in columns.items()}
    index = np.array([f"task {group}" for group in made["groups"]], dtype=object)

    def estimate(name, **given):
        function = core_algos.get_adv_estimator_fn(name)
        advantages, returns = function(
            token_level_rewards=torch.from_numpy(rewards.copy()),
            response_mask=torch.from_numpy(mask).double(),
            **given,
        )
        return advantages.double().numpy()[mask], returns.double().numpy()[mask]

    grouped = {"index": index}
    token = {"old_log_probs": tensor["old"], "sum_pi_squared": tensor["sum_pi_squared"]}
    pairs = {
        "grpo": estimate("grpo", **grouped),
        "grpo_vectorized": estimate("grpo_vectorized", index=made["groups"]),
        "dr_grpo": estimate("grpo", norm_adv_by_std_in_grpo=False, **grouped),
        "rloo": estimate("rloo", **grouped),
        "rloo_vectorized": estimate("rloo_vectorized", index=made["groups"]),
        "opo": estimate("opo", **grouped),
        "gpg": estimate("gpg", f_norm=2.0, **grouped),
        "reinforce_plus_plus_baseline": estimate("reinforce_plus_plus_baseline", **grouped),
        "reinforce_plus_plus": estimate("reinforce_plus_plus", config=AlgoConfig(gamma=GAMMA)),
        "gae": estimate("gae", values=tensor["values"], gamma=GAMMA, lam=LAM),
        "remax": estimate("remax", reward_baselines=torch.from_numpy(made["greedy"])[made["groups"]]),
        "gdpo": estimate(
            "gdpo",
            config=OmegaConf.create({"gdpo_reward_keys": KEYS, "gdpo_reward_weights": WEIGHTS}),
            non_tensor_batch=components,
            batch={"prompts": torch.zeros(len(mask), 0, dtype=torch.long), "attention_mask": attention(mask)},
            **grouped,
        ),
    }
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        pairs[name] = estimate(name, **token, **grouped)
        pairs[f"{name}/weighted"] = estimate(name, rollout_is_weights=tensor["weights"], **token, **grouped)
    if len(mask) and np.bincount(made["groups"]).min() > 1:  # verl refuses a group of one
        for name, by_std in (("grpo_passk", True), ("grpo_passk/plain", False)):
            pairs[name] = estimate("grpo_passk", config=AlgoConfig(norm_adv_by_std_in_grpo=by_std), **grouped)
    found = {name: advantages for name, (advantages, _) in pairs.items()}
    found["gae/returns"] = pairs["gae"][1]
    found["value_loss"] = np.array(
        [
            float(value)
            for value in core_algos.compute_value_loss(
                tensor["predicted"], tensor["returns"], tensor["values"], torch.from_numpy(mask).double(), 0.5
            )
        ]
    )
    for method in ("pow", "max_min", "max_random"):
        found[f"resample/{method}"] = resample_weights(rewards.sum(1), method)
    found["overlong"] = np.array([overlong(length) for length in mask.sum(1)])
    return found


def attention(mask: np.ndarray) -> torch.Tensor:
    """[N, T] up to the last action token; here without a prompt."""
    ends = np.array([np.flatnonzero(row)[-1] for row in mask])
    return torch.from_numpy(np.arange(mask.shape[1]) <= ends[:, None]).long()


def resample_weights(scores: np.ndarray, method: str) -> np.ndarray:
    """What verl's PF-PPO hands to its draw."""
    batch = {"token_level_scores": torch.from_numpy(scores)[:, None]}
    data = SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={})
    seen = []

    class Seen(Exception):
        pass

    def draw(weights, *_, **__):
        seen.append(weights.numpy())
        raise Seen

    with mock.patch.object(torch, "multinomial", draw):
        try:
            core_algos.compute_pf_ppo_reweight_data(data, method, 1.5)
        except Seen:
            return seen[0]
    raise AssertionError("verl drew nothing")


def overlong(length: int) -> float:
    """verl's DAPO reward manager on an answer of `length` tokens that scores 0; buffer 4, longest 12."""

    async def score(**_):
        return 0.0

    async def run():
        manager = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            tokenizer=SimpleNamespace(decode=lambda *_, **__: ""),
            compute_score=score,
            is_async_reward_score=True,
            reward_router_address=None,
            max_resp_len=12,
            overlong_buffer_cfg=SimpleNamespace(enable=True, len=4, penalty_factor=1.0, log=False),
        )
        data = DataProto.from_dict(
            tensors={
                "responses": torch.zeros(1, 16, dtype=torch.long),
                "attention_mask": (torch.arange(16) < length)[None].long(),
            },
            non_tensors={
                "data_source": np.array(["none"], dtype=object),
                "reward_model": np.array([{"ground_truth": ""}], dtype=object),
            },
        )
        return (await DAPORewardManager.run_single(manager, data))["reward_score"]

    return float(asyncio.run(run()))


def compact(values: np.ndarray) -> np.ndarray:
    """Answers are kept to float32: compared at 1e-5, they need no more."""
    return values.astype(np.float32)


if __name__ == "__main__":
    arrays = {}
    for number in range(CASES):
        for what, values in case(number).items():
            arrays[f"{number}/{what}"] = compact(values) if what.startswith("verl/") else values
    path = Path(__file__).with_name("advantages.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size} bytes")
