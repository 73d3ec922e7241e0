"""Every algorithm by the name that a configuration gives it: one dict for each kind.

A new one is a function beside its kin, an entry here, and its table in async_rl/config/algorithms.py; the function
gets that table. Your own needs none of it: `kind = "custom"`, `function = "module:attribute"`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from async_rl.algorithms import advantages, aggregation, losses, returns, token_baseline
from async_rl.algorithms.aggregation import Totals
from async_rl.algorithms.custom_advantage import custom_estimate
from async_rl.algorithms.custom_loss import custom_loss
from async_rl.algorithms.members import Estimate, Members, TokenLoss, Tokens
from async_rl.config.algorithms import CustomAdvantage, CustomLoss
from async_rl.config.base import Table

Need = Literal["components", "greedy", "values", "old", "sum_pi_squared", "implicit"]
"""What of Members an estimator reads beyond what there always is."""

Weigh = Callable[[Tensor, Tensor, int, Totals, int], Tensor]
"""loss mask [A] as numbers, sequence [A], sequences, totals of the update, horizon -> weights [A]."""


class Estimator(NamedTuple):
    estimate: Callable[[Members, Any], Estimate]
    needs: tuple[Need, ...] = ()


class PolicyLoss(NamedTuple):
    evaluate: Callable[[Tokens, Any], TokenLoss]
    proportional: bool = True
    """Advantage 0 means gradient 0: such members need no forward pass."""
    choose: Callable[[Tokens, Any, Tensor], Tensor] | None = None
    """Picks tokens [A] by statistics of the whole update, before it is split; the last argument is noise [A] in
    [0, 1), the same however the update is split. The result comes back as Tokens.chosen."""
    aggregation: str = "token-mean"
    """Where the configuration names none."""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(advantages.grpo),
    "gdpo": Estimator(advantages.gdpo, needs=("components",)),
    "grpo_passk": Estimator(advantages.grpo_passk),
    "gae": Estimator(returns.gae, needs=("values",)),
    "reinforce_plus_plus": Estimator(returns.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(advantages.reinforce_plus_plus_baseline),
    "remax": Estimator(returns.remax, needs=("greedy",)),
    "rloo": Estimator(advantages.rloo),
    "opo": Estimator(advantages.opo),
    "gpg": Estimator(advantages.gpg),
    "optimal_token_baseline": Estimator(token_baseline.optimal_token_baseline, needs=("old", "sum_pi_squared")),
    "tir_optimal_token_baseline": Estimator(token_baseline.tir_optimal_token_baseline, needs=("old", "sum_pi_squared")),
    "maxrl": Estimator(advantages.maxrl),
    "prime": Estimator(returns.prime, needs=("implicit",)),
}

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(losses.ppo),
    "dppo_tv": PolicyLoss(losses.dppo_tv),
    "dppo_kl": PolicyLoss(losses.dppo_kl),
    "gspo": PolicyLoss(losses.gspo, aggregation="seq-mean-token-mean"),
    "sapo": PolicyLoss(losses.sapo, aggregation="seq-mean-token-mean"),
    "reinforce": PolicyLoss(losses.reinforce),
    "clip_cov": PolicyLoss(losses.clip_cov, choose=losses.choose_clip_cov),
    "kl_cov": PolicyLoss(losses.kl_cov, choose=losses.choose_kl_cov, proportional=False),
    "gmpo": PolicyLoss(losses.gmpo, aggregation="seq-mean-token-mean"),
    "dro": PolicyLoss(losses.dro, proportional=False),
    "cispo": PolicyLoss(losses.cispo),
    "topr": PolicyLoss(losses.topr),
}

AGGREGATIONS: dict[str, Weigh] = {
    "token-mean": aggregation.token_mean,
    "token-sum": aggregation.token_sum,
    "seq-mean-token-sum": aggregation.seq_mean_token_sum,
    "seq-mean-token-mean": aggregation.seq_mean_token_mean,
    "seq-mean-token-sum-norm": aggregation.seq_mean_token_sum_norm,
}


def estimator(settings: Table) -> Estimator:
    """That of `algorithm.advantage`."""
    if isinstance(settings, CustomAdvantage):
        return Estimator(custom_estimate(settings), needs=("components",))
    return ESTIMATORS[_tag(settings)]


def policy_loss(settings: Table) -> PolicyLoss:
    """That of `algorithm.loss`."""
    if isinstance(settings, CustomLoss):
        return PolicyLoss(custom_loss(settings), proportional=False)
    return LOSSES[_tag(settings)]


def _tag(settings: Table) -> str:
    return settings.kind
