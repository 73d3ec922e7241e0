"""One step of training: draw -> advantages -> masks -> mini-batches -> updates.

Pure of sockets and clocks; the service calls it in a thread of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from async_rl.algorithms.advantages import Members, zero_variance
from async_rl.algorithms.registry import ESTIMATORS, estimator_name
from async_rl.config.modes import bounds
from async_rl.config.schema import Config
from async_rl.protocol.buffer import Drawn, DrawnMember
from async_rl.services.trainer.masks import Masked, loss_mask, require_bound
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy, Update
from async_rl.services.trainer.samples import Sample, sample_of


@dataclass(frozen=True)
class StepResult:
    """What a step did; metrics.py makes its figures of it."""

    masks: list[Masked]  # of each member, in the order of the draw
    equal_groups: int  # groups whose voters' rewards were all equal
    updates: list[Update]


def train_step(drawn: Drawn, policy: Policy, config: Config) -> StepResult:
    """Train `policy` on `drawn`: mini-batches x epochs optimizer updates."""
    objective = Objective.of(config)
    members = statistics(drawn, config.batch.group_size)
    advantages = ESTIMATORS[estimator_name(config.algorithm)](members, config.algorithm)
    masks = judge(drawn, config)
    samples = [
        sample_of(member.trajectory, mask, own)
        for member, mask, own in zip(flat(drawn), masks, torch.split(advantages, members.lengths.tolist()), strict=True)
    ]
    updates = [
        policy.update(part, objective)
        for _ in range(config.batch.epochs)
        for part in mini_batches(samples, [len(g.members) for g in drawn.groups], config.batch.mini_batches)
    ]
    return StepResult(masks, int(zero_variance(members).sum()), updates)


def flat(drawn: Drawn) -> list[DrawnMember]:
    """The members of all groups, in the order of the draw."""
    return list(chain.from_iterable(group.members for group in drawn.groups))


def statistics(drawn: Drawn, group_size: int) -> Members:
    """What advantages are estimated from."""
    everyone = flat(drawn)
    sizes = torch.tensor([len(group.members) for group in drawn.groups])
    return Members(
        rewards=torch.tensor([m.score.reward or 0.0 for m in everyone], dtype=torch.float64),
        votes=torch.tensor([m.score.votes for m in everyone]),
        groups=torch.arange(len(drawn.groups)).repeat_interleave(sizes),
        lengths=torch.tensor([int(m.trajectory.action.sum()) for m in everyone]),
        group_size=group_size,
    )


def judge(drawn: Drawn, config: Config) -> list[Masked]:
    """The loss mask of each member, its lag judged at this step (a draw may be trained at several)."""
    on_exceed, truncated = bounds(config).on_exceed, config.algorithm.truncated
    masks = []
    for group in drawn.groups:
        for member in group.members:
            mask = loss_mask(
                member.trajectory,
                member.score,
                step=drawn.step,
                bound=group.bound,
                on_exceed=on_exceed,
                truncated=truncated,
            )
            require_bound(mask, group.bound)
            masks.append(mask)
    return masks


def mini_batches(samples: Sequence[Sample], group_sizes: Sequence[int], parts: int) -> list[list[Sample]]:
    """`samples` cut into at most `parts` runs of whole groups, about equal in groups; none is empty."""
    groups = len(group_sizes)
    ends = [sum(group_sizes[: groups * part // parts]) for part in range(parts + 1)]
    return [list(samples[a:b]) for a, b in pairwise(ends) if b > a]
