"""Every algorithm by the name that a configuration gives it: one dict for each kind.

An entry adapts a pure function to what its kind is called with; the settings come from the algorithm's table.
A new algorithm is a function beside its kin, an entry here, and its table in async_rl/config/schema.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from async_rl.algorithms import advantages, aggregation, losses
from async_rl.algorithms.advantages import Members
from async_rl.algorithms.aggregation import Totals
from async_rl.algorithms.losses import TokenLoss, Tokens
from async_rl.config.schema import GRPO, Algorithm

Estimate = Callable[[Members, Algorithm], Tensor]
"""Members of a whole step -> advantages [A] of their action tokens."""

Weigh = Callable[[Tensor, Tensor, int, Totals, int], Tensor]
"""loss mask [A] as numbers, sequence [A], sequences, totals of the update, horizon -> weights [A]."""


class PolicyLoss(NamedTuple):
    evaluate: Callable[[Tokens, Algorithm], TokenLoss]
    proportional: bool
    """Advantage 0 means gradient 0: such members need no forward pass."""


def _grpo(members: Members, settings: GRPO) -> Tensor:
    values = advantages.grpo(
        members.rewards,
        members.votes,
        members.groups,
        group_size=members.group_size,
        normalize_by_std=settings.normalize_by_std,
    )
    return advantages.over_tokens(values, members.lengths)


def _ppo(tokens: Tokens, settings: GRPO) -> TokenLoss:
    return losses.ppo(
        tokens.logprobs,
        tokens.old,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )


ESTIMATORS: dict[str, Estimate] = {
    "grpo": _grpo,
}

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(_ppo, proportional=True),
}

AGGREGATIONS: dict[str, Weigh] = {
    "token-mean": aggregation.token_mean,
    "token-sum": aggregation.token_sum,
    "seq-mean-token-sum": aggregation.seq_mean_token_sum,
    "seq-mean-token-mean": aggregation.seq_mean_token_mean,
    "seq-mean-token-sum-norm": aggregation.seq_mean_token_sum_norm,
}


def estimator_name(settings: Algorithm) -> str:
    """The estimator that a table of `[algorithm]` chooses: its tag, `advantage = "..."`."""
    return str(settings.__struct_config__.tag)
