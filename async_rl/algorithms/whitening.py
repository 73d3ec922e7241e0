"""W: advantages of mean 0 and variance 1 over the trained tokens of a whole step."""

import torch
from torch import Tensor

from async_rl.algorithms.members import Members
from async_rl.trajectory import EQUAL

EPSILON = 1e-8


def whitened(values: Tensor, members: Members, counted: Tensor) -> Tensor:
    """[A] (x - mean) / sqrt(var + 1e-8), mean and unbiased variance over loss tokens of the members `counted` [N].

    Members that are not counted get 0. So does everything where the values are equal up to float noise, and where
    fewer than two tokens are left; the function of the same purpose in verl raises then.
    """
    given = members.over_tokens(counted)
    inside = values[given & members.loss]
    if len(inside) < 2:
        return torch.zeros_like(values)
    centred = inside - inside.mean()
    if centred.abs().max() <= EQUAL * inside.abs().max():
        return torch.zeros_like(values)
    variance = (centred**2).sum() / (len(inside) - 1)
    return torch.where(given, (values - inside.mean()) * torch.rsqrt(variance + EPSILON), 0.0)
