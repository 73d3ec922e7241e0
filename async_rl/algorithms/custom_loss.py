"""A policy loss of the user's own, held to what the update needs of one."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_rl.algorithms.members import TokenLoss, Tokens
from async_rl.config.algorithms import CustomLoss
from async_rl.errors import UserError
from async_rl.user_code import load

KEY = "algorithm.loss.function"


def custom_loss(settings: CustomLoss) -> Callable[[Tokens, CustomLoss], TokenLoss]:
    """`settings.function` is `loss(tokens, settings) -> Tensor [A]`, or a TokenLoss; it gets the free table
    `settings.settings`."""
    function = load(KEY, settings.function, "loss(tokens, settings)")
    setting = f"{KEY} = '{settings.function}'"

    def evaluate(tokens: Tokens, own: CustomLoss) -> TokenLoss:
        made = function(tokens, own.settings)
        if isinstance(made, Tensor):
            made = TokenLoss(made, torch.zeros_like(tokens.loss))
        if not isinstance(made, TokenLoss):
            raise UserError(f"{setting} returned {type(made).__name__}, neither a tensor nor a TokenLoss")
        if made.values.shape != tokens.logprobs.shape:
            raise UserError(
                f"{setting} returned a loss of shape {list(made.values.shape)}, not one number for each of the "
                f"{len(tokens.logprobs)} action tokens"
            )
        if not made.values.requires_grad:
            raise UserError(f"{setting} returned a loss without a gradient: build it from tokens.logprobs")
        return made

    return evaluate
