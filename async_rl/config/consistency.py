"""What in `[algorithm]` cannot be meant together with the rest of a configuration. Pure."""

from collections.abc import Iterator

from async_rl.config.algorithms import GAE, GDPO, GPG, OPO, PRIME, RLOO, GRPOPassK, MaxRL, Reject
from async_rl.config.modes import bounds, correction
from async_rl.config.schema import Config

GROUPED = (GDPO, GRPOPassK, RLOO, OPO, GPG, MaxRL, PRIME)
"""Estimators that compare the members of a group: with groups of one there is nothing to learn."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """One line each."""
    settings, limits, fix = config.algorithm, bounds(config), correction(config)
    advantage, name = settings.advantage, settings.advantage.kind
    if isinstance(advantage, GROUPED) and config.batch.group_size == 1:
        yield f"algorithm.advantage.kind = '{name}' compares the members of a group: batch.group_size = 1 has none"
    if isinstance(advantage, GDPO) and not advantage.weights:
        yield "algorithm.advantage.weights is empty: name the components of the grader's scores"
    if isinstance(advantage, GDPO) and (settings.overlong or (settings.kl and settings.kl.place == "reward")):
        yield "algorithm.advantage.kind = 'gdpo' looks at components alone: overlong and a KL in the reward are lost"
    if settings.critic.warmup_steps and not isinstance(advantage, GAE):
        yield f"algorithm.critic.warmup_steps: there is no critic with advantage.kind = '{name}'; 'gae' has one"
    if fix.proximal == "loglinear" and limits.keep_cache:
        yield (
            "algorithm.correction.proximal = 'loglinear' needs the version of each token, and with "
            "staleness.keep_cache tokens carry the oldest of theirs; use 'recompute'"
        )
    if fix.weights is not None:
        low, high = fix.weights.band or (0.0, 1.0)
        if fix.weights.band is not None and not 0 <= low < high:
            yield f"algorithm.correction.weights.band = [{low:g}, {high:g}]: 0 <= low < high"
    for rejection in fix.rejections:
        if isinstance(rejection, Reject) and rejection.min is not None and rejection.min >= rejection.max:
            yield f"algorithm.correction.rejections: min = {rejection.min:g} is not below max = {rejection.max:g}"
    overlong, limit = settings.overlong, config.sampling.max_new_tokens
    if overlong is not None:
        longest = overlong.max or limit
        if overlong.buffer > longest:
            yield f"algorithm.overlong.buffer = {overlong.buffer} is larger than the longest answer, {longest}"
        if longest > limit:
            yield f"algorithm.overlong.max = {longest}: no answer has more than sampling.max_new_tokens = {limit}"
    if settings.resample is not None and config.batch.group_size * config.batch.groups == 1:
        yield "algorithm.resample: a step of one trajectory has nothing to draw from"
