"""A whole step on a small model, and the figures made of it."""

import json

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import InvariantError
from async_rl.services.trainer import metrics
from async_rl.services.trainer.metrics import MetricsFile, StepRecord, step_record
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import advantages, batch_of, mini_batches, train_step
from tests.unit.trainer_material import (
    configuration,
    drawn,
    plain_logprobs,
    random_trajectory,
    tiny_llama,
    trajectory,
)


def record_of(batch, config, policy=None, on_exceed="mask"):
    result = train_step(batch, Roles(policy or Policy(tiny_llama(), config)), config)
    return step_record(batch, result, on_exceed=on_exceed, wall_s=9.0, draw_wait_s=2.0, train_s=1.0, held_out=None)


def test_a_step_makes_mini_batches_times_epochs_updates():
    config = configuration(batch={"groups": 4, "group_size": 2, "mini_batches": 2, "epochs": 3})
    generator = np.random.default_rng(0)
    groups = [[(random_trajectory(generator), float(m)) for m in range(2)] for _ in range(4)]
    assert len(train_step(drawn(groups), Roles(Policy(tiny_llama(), config)), config).updates) == 6


def test_mini_batches_are_whole_groups_and_none_is_empty():
    assert mini_batches([[c] for c in "aabbbcdd"], [2, 3, 1, 2], 2) == [list("aabbb"), list("cdd")]
    assert mini_batches([[c] for c in "aabb"], [2, 2], 3) == [list("aa"), list("bb")]


def test_a_rewarded_answer_becomes_more_likely():
    config = configuration(batch={"groups": 1, "group_size": 2}, max_steps=10)
    policy = Policy(tiny_llama(), config)
    good, bad = [trajectory([1, 2], [k], logprobs=[-2.5]) for k in (3, 4)]
    before = plain_logprobs(tiny_llama(), good)
    for _ in range(5):
        train_step(drawn([[(good, 1.0), (bad, 0.0)]]), Roles(policy), config)
    policy.model.config._attn_implementation = "sdpa"
    assert plain_logprobs(policy.model, good) > before + 0.1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 1.0, 0.0], [0.866, -0.866, 0.866, -0.866]),  # field report 21: grouped by task
        ([1.0, 3.0, 2.0, None], [-1.0, 1.0, 0.0, 0.0]),  # field report 46: the failed one is in no mean
    ],
)
def test_the_members_of_a_task_are_one_group(rewards, expected):
    config = configuration(batch={"groups": 2, "group_size": 4})
    other = [(trajectory([1], [2]), 1.0)] * 4
    batch = drawn([[(trajectory([1], [k]), reward) for k, reward in enumerate(rewards)], other])
    estimate = advantages(batch_of(batch, config), Roles(Policy(tiny_llama(), config)))
    assert estimate.advantages.tolist() == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-3)
    record = record_of(batch, config)
    votes = [reward for reward in rewards if reward is not None]
    assert record.voting == len(votes) + 4 and record.reward_by_source["even"] == pytest.approx(np.mean(votes))
    assert record.trained_tokens == len(votes) + 4


def test_figures_of_a_step():
    config = configuration(batch={"groups": 3, "group_size": 2})
    generator = np.random.default_rng(0)
    fresh = [random_trajectory(generator, versions=5) for _ in range(4)]
    mixed = trajectory([1, 2], [3, 4, 5, 6], versions=[(1, 1), (3, 2), (5, 1)], stop="length")
    other = random_trajectory(generator, versions=4)
    batch = drawn(
        [
            [(mixed, 1.0), (other, 0.0)],
            [(fresh[0], 1.0), (fresh[1], 1.0)],
            [(fresh[2], None), (fresh[3], 0.5)],
        ],
        step=5,
        bound=2,
    )
    record = record_of(batch, config)
    lengths = [int(t.action.sum()) for t in (mixed, other, *fresh)]
    assert (record.version, record.groups, record.members, record.voting) == (6, 3, 6, 5)
    assert record.reward_mean == pytest.approx(3.5 / 5)
    assert record.reward_by_source == pytest.approx({"even": 1.5 / 3, "odd": 1.0})
    assert record.zero_variance_share == pytest.approx(2 / 3)  # equal rewards; a single voter
    assert record.lag_histogram == {0: 1 + lengths[2] + lengths[3] + lengths[5], 1: lengths[1], 2: 2}
    assert record.lag_max == 2
    assert record.trained_tokens == sum(lengths) - 1 - lengths[4]
    assert record.masked_by == pytest.approx({"stale": 1 / sum(lengths), "voteless": lengths[4] / sum(lengths)})
    assert record.masked_share == pytest.approx((1 + lengths[4]) / sum(lengths))
    assert set(record.mismatch_by_lag) == {0, 1, 2, 4}  # before anything is masked
    assert record.truncated_share == pytest.approx(1 / 6)
    assert (record.length_mean, record.length_max) == (pytest.approx(np.mean(lengths)), max(lengths))
    assert record.updates == 1 and record.skipped_updates == 0
    assert record.entropy > 0 and 0 <= record.clip_fraction <= 1 and record.gradient_norm > 0


def test_a_group_left_with_a_single_voter_counts_as_zero_variance_and_trains_nothing():
    config = configuration(batch={"groups": 1, "group_size": 2})
    batch = drawn([[(trajectory([1], [2]), None), (trajectory([1], [3]), 1.0)]])
    record = record_of(batch, config)
    assert record.gradient_norm == 0.0
    assert record.mismatch_kl_k3 is None


def test_non_finite_behaviour_logprobs_give_a_finite_loss_and_a_count():
    """Field report 17: [-1, NaN, -2]."""
    config = configuration(batch={"groups": 1, "group_size": 2})
    odd = trajectory([1], [2, 3, 4], logprobs=[-1.0, float("nan"), -2.0])
    record = record_of(drawn([[(odd, 1.0), (trajectory([1], [5]), 0.0)]]), config)
    assert record.masked_by == {"nonfinite": 0.25}
    assert record.skipped_updates == 0 and np.isfinite(record.policy_loss) and record.gradient_norm > 0


def test_in_sync_mode_a_stale_token_ends_the_run():
    config = configuration(mode="sync", batch={"groups": 1, "group_size": 2})
    batch = drawn([[(trajectory([1], [2], versions=[(2, 1)]), 1.0), (trajectory([1], [3]), 0.0)]], step=3)
    with pytest.raises(InvariantError, match="promises at most 0"):
        train_step(batch, Roles(Policy(tiny_llama(), config)), config)


def test_a_draw_that_is_trained_again_has_its_lag_judged_again():
    config = configuration(mode="off-policy", batch={"groups": 1, "group_size": 2})
    policy = Policy(tiny_llama(), config)
    members = [(trajectory([1], [2], versions=[(1, 1)]), 1.0), (trajectory([1], [3], versions=[(1, 1)]), 0.0)]
    lags = [
        record_of(drawn([members], step=1 + k, bound=4, sequence=k), config, policy).lag_histogram for k in range(2)
    ]
    assert lags == [{0: 2}, {1: 2}]


def test_the_policy_loss_is_no_progress_signal():
    """Field report 51: at the first update advantages are centred, so the loss is 0 whatever the reward."""
    config = configuration(batch={"groups": 1, "group_size": 2})
    model = tiny_llama()
    members = []
    for token, reward in ((2, 1.0), (3, 0.0)):
        lp = plain_logprobs(model, trajectory([1], [token])).tolist()
        members.append((trajectory([1], [token], logprobs=lp), reward))
    record = record_of(drawn([members]), config, Policy(model, config))
    assert record.policy_loss == pytest.approx(0.0, abs=1e-6)
    assert record.gradient_norm > 0.01
    assert "no progress signal" in metrics.__doc__


def test_metrics_are_one_json_line_a_record(tmp_path):
    config = configuration(batch={"groups": 1, "group_size": 2})
    equal = drawn([[(trajectory([1], [2]), 1.0), (trajectory([1], [3]), 1.0)]])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record_of(equal, config))
    file.write(record_of(equal, config))  # made again
    file.write(msgspec.structs.replace(record_of(equal, config), step=1, version=2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "step"]
    assert lines[0]["mismatch_kl_k3"] is None  # nothing was measured
    assert msgspec.json.decode(json.dumps(lines[0]), type=StepRecord).lag_histogram == {0: 2}


def test_the_same_draw_gives_the_same_step():
    config = configuration(batch={"groups": 4, "group_size": 4, "mini_batches": 2})
    generator = np.random.default_rng(0)
    batch = drawn([[(random_trajectory(generator), float(m % 2)) for m in range(4)] for _ in range(4)])
    weights = []
    for _ in range(2):
        policy = Policy(tiny_llama(dtype=torch.float32), config)
        train_step(batch, Roles(policy), config)
        weights.append(policy.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
