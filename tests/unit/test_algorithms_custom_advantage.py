"""An estimator of the user's own: what it gets, and what is refused in one line."""

import pytest
import torch

from async_rl.algorithms.registry import estimator
from async_rl.config.algorithms import CustomAdvantage
from async_rl.errors import UserError
from tests.unit.advantage_material import members_of

CODE = """
import torch
from async_rl.algorithms.members import Estimate


def centred(members, settings):
    return settings["scale"] * members.over_tokens(members.rewards - members.rewards[members.votes].mean())


def with_returns(members, settings):
    return Estimate(centred(members, {"scale": 1.0}), returns=members.over_tokens(members.rewards))


def of_members(members, settings):
    return members.rewards


def as_list(members, settings):
    return members.token_rewards.tolist()


def divides(members, settings):
    return members.token_rewards / 0


def single(members, settings):
    return members.over_tokens(members.rewards).float().requires_grad_()


def broken_returns(members, settings):
    return Estimate(members.token_rewards, returns=members.rewards)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The estimator that `name` of the user's file is."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"own_advantages_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(CODE)

    def of(name, **settings):
        table = CustomAdvantage(function=f"{module}:{name}", settings=settings)
        return estimator(table).estimate(MEMBERS, table)

    return of


MEMBERS = members_of([1.0, 0.0, None], lengths=[2, 1, 1])


def test_it_gets_members_and_its_own_settings_and_members_without_a_vote_stay_at_zero(own):
    made = own("centred", scale=2.0)
    assert made.advantages.tolist() == [1, 1, -1, 0]
    assert made.returns is None


def test_it_may_give_returns_for_a_critic(own):
    assert own("with_returns").returns.tolist() == [1, 1, 0, 0]


def test_what_it_gives_becomes_double_without_a_gradient(own):
    advantages = own("single").advantages
    assert advantages.dtype == torch.float64 and not advantages.requires_grad


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("of_members", r"advantages of shape \[3\], not one number for each of the 4 action tokens"),
        ("as_list", "list for its advantages, not a tensor"),
        ("divides", "advantages of which 4 of 4 are not finite"),
        ("broken_returns", r"returns of shape \[3\]"),
        ("centered", r"has no 'centered' \(did you mean 'centred'\?\)"),
    ],
)
def test_what_is_wrong_with_it_is_one_line_that_names_the_setting(own, name, wrong):
    with pytest.raises(UserError, match=wrong) as raised:
        own(name)
    assert str(raised.value).startswith("algorithm.advantage.function = 'own_advantages_")
    assert "\n" not in str(raised.value)
