"""Episodes in the step: turns with what tools wrote between them, and branches."""

import msgspec
import numpy as np
import torch

from async_rl.services.trainer.network import Network
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import advantages, batch_of, train_step
from async_rl.trajectory import Sequence, token_lags
from tests.unit.trainer_material import configuration, drawn, plain_logprobs, tiny_llama, trajectory

TURNS = [1, 2, 3, 4, 5, 6, 7, 8]


def episode():
    """Two turns with a tool's answer between them, and a branch that begins again after the first turn."""
    action = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    logprobs = np.where(action, -1.0, 0.0).astype(np.float32)
    branch = Sequence(
        tokens=np.array([1, 2, 3, 4, 9, 10, 11], dtype=np.int32),
        action=np.array([0, 0, 0, 0, 0, 1, 1], dtype=bool),  # 3 and 4 are trained with the trunk
        logprobs=np.array([0, 0, 0, 0, 0, -2.0, -2.0], dtype=np.float32),
        versions=[(1, 2)],
    )
    made = trajectory([1, 2], [3, 4, 5, 6, 7, 8], versions=[(0, 2), (1, 2)])
    return msgspec.structs.replace(
        made, tokens=np.array(TURNS, np.int32), action=action, logprobs=logprobs, branches=[branch], turns=3
    )


def batch():
    config = configuration(batch={"groups": 1, "group_size": 2})
    return batch_of(drawn([[(episode(), 1.0), (trajectory([1, 2], [5]), 0.0)]], step=1, bound=1), config), config


def test_shared_tokens_are_trained_once_and_the_branch_reads_them():
    made, config = batch()
    assert [s.trained for s in made.samples] == [4, 2, 1]
    assert [len(own) for own in made.by_member()] == [2, 1]
    read = Network(tiny_llama(), config).logprobs(made.samples)
    whole = episode()
    expected = [plain_logprobs(tiny_llama(), part) for part in (*whole.sequences, trajectory([1, 2], [5]))]
    torch.testing.assert_close(read, torch.cat(expected), rtol=1e-6, atol=1e-6)


def test_a_branch_inherits_its_episodes_advantage_and_has_no_vote():
    made, _ = batch()
    given = advantages(made, Roles(Policy(tiny_llama(), made.config))).advantages
    assert len(made.members.rewards) == 2
    assert given[:6].unique().tolist() == [given[0].item()]
    assert given[0] > 0 > given[6]


def test_versions_and_lags_run_over_turns_and_branches():
    whole = episode()
    assert whole.problems() is None
    assert token_lags(whole, 2).tolist() == [2, 2, 1, 1, 1, 1]
    assert (whole.oldest_version, whole.sampled) == (0, 6)
    assert whole.nbytes > trajectory(TURNS[:2], TURNS[2:]).nbytes


def test_what_is_wrong_with_a_branch_is_found():
    whole = episode()
    torn = msgspec.structs.replace(whole.branches[0], versions=[(1, 5)])
    assert "do not cover" in (msgspec.structs.replace(whole, branches=[torn]).problems() or "")


def test_an_episode_is_trained():
    config = configuration(batch={"groups": 1, "group_size": 2}, mode="async", staleness={"max": 1})
    policy = Policy(tiny_llama(), config)
    before = policy.logprobs(batch()[0].samples)[:6].sum()
    group = [(episode(), 1.0), (trajectory([1, 2], [5]), 0.0)]
    result = train_step(drawn([group], step=1, bound=1), Roles(policy), config)
    assert [len(mask.loss) for mask in result.masks] == [6, 1]
    assert policy.logprobs(batch()[0].samples)[:6].sum() > before
