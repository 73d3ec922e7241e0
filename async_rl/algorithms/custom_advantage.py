"""An advantage estimator of the user's own, held to what the update needs of one."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_rl.algorithms.members import Estimate, Members
from async_rl.config.algorithms import CustomAdvantage
from async_rl.errors import UserError
from async_rl.user_code import load

KEY = "algorithm.advantage.function"


def custom_estimate(settings: CustomAdvantage) -> Callable[[Members, CustomAdvantage], Estimate]:
    """`settings.function` is `estimate(members, settings) -> Tensor [A]`, or an Estimate; it gets the free table
    `settings.settings`. A member without a vote gets 0, whatever it says."""
    function = load(KEY, settings.function, "estimate(members, settings)")
    setting = f"{KEY} = '{settings.function}'"

    def estimate(members: Members, own: CustomAdvantage) -> Estimate:
        made = function(members, own.settings)
        given = made if isinstance(made, Estimate) else Estimate(made)
        advantages = _sound(given.advantages, "advantages", members, setting)
        counted = members.over_tokens(members.votes)
        returns = None if given.returns is None else _sound(given.returns, "returns", members, setting)
        return Estimate(torch.where(counted, advantages, 0.0), returns)

    return estimate


def _sound(values: object, what: str, members: Members, setting: str) -> Tensor:
    """[A] float64, finite."""
    if not isinstance(values, Tensor):
        raise UserError(f"{setting} returned {type(values).__name__} for its {what}, not a tensor")
    expected = (int(members.lengths.sum()),)
    if tuple(values.shape) != expected:
        raise UserError(
            f"{setting} returned {what} of shape {list(values.shape)}, not one number for each of the "
            f"{expected[0]} action tokens"
        )
    values = values.detach().double().cpu()
    if not bool(torch.isfinite(values).all()):
        wrong = int((~torch.isfinite(values)).sum())
        raise UserError(f"{setting} returned {what} of which {wrong} of {expected[0]} are not finite")
    return values
