"""One step of training, as a dataflow over named roles:

    batch_of    the draw as tensors: rewards, votes, loss masks
    with_roles  what the reference and the critic say of it; the KL that is a part of the reward
    advantages  the estimator, given what it asks the roles for
    update      mini-batches x epochs optimizer updates of the policy, and of the roles that learn beside it

`learn` is the last two. Your own, named by algorithm.step, is a function of the same form: it gets the same batch and
uses them as it likes. Pure of sockets and clocks; the service calls it in a thread of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.advantages import zero_variance
from async_rl.algorithms.corrections import importance_weights
from async_rl.algorithms.kl import adapted, penalty
from async_rl.algorithms.losses import log_ratio
from async_rl.algorithms.members import Estimate, Members
from async_rl.algorithms.registry import Need, estimator
from async_rl.algorithms.shaping import overlong_penalty, resampled
from async_rl.config.modes import bounds, correction
from async_rl.config.schema import Config
from async_rl.errors import InvariantError, UserError
from async_rl.protocol.buffer import Drawn, DrawnMember
from async_rl.services.trainer.critic import Critic
from async_rl.services.trainer.masks import Masked, loss_mask, require_bound
from async_rl.services.trainer.network import sum_pi_squared
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Update
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.samples import Sample, samples_of, with_columns
from async_rl.user_code import load


@dataclass(frozen=True)
class Batch:
    """A draw as what a step works on. What is per token is [A], the action tokens of all members in draw order."""

    drawn: Drawn
    config: Config
    members: Members
    masks: list[Masked]  # of each member
    samples: list[Sample]  # the sequences of all members

    @cached_property
    def behaviour(self) -> Tensor:
        """[A] float64, as sampled; 0 where that is not finite."""
        return self.column("behaviour").double()

    @cached_property
    def finite(self) -> Tensor:
        """[A] bool"""
        return self.column("finite")

    def column(self, name: str) -> Tensor:
        """[A] of Sample's column `name`, which all samples have."""
        return torch.cat([getattr(sample, name) for sample in self.samples])

    def given(self, **columns: Tensor) -> "Batch":
        """With columns of Sample ("reference", "old", ...) of these values [A]."""
        return replace(self, samples=with_columns(self.samples, columns))

    def by_member(self) -> list[list[Sample]]:
        """The samples of each member: one, and one for each branch of an episode."""
        rest = iter(self.samples)
        return [list(islice(rest, len(member.trajectory.sequences))) for member in flat(self.drawn)]


@dataclass(frozen=True)
class StepResult:
    """What a step did; metrics.py makes its figures of it."""

    masks: list[Masked]  # of each member, in the order of the draw
    equal_groups: int  # groups whose voters' rewards were all equal
    updates: list[Update]  # none while the critic warms up
    figures: dict[str, float]  # of the other roles, by name


KEY = "algorithm.step"


def train_step(drawn: Drawn, roles: Roles, config: Config) -> StepResult:
    """Train `roles.policy` on `drawn` by the run's dataflow."""
    own = config.algorithm.step
    flow: Callable[[Batch, Roles], StepResult] = learn if own is None else load(KEY, own, "step(batch, roles)")
    result = flow(with_roles(batch_of(drawn, config), roles), roles)
    if not isinstance(result, StepResult):
        raise UserError(f"{KEY} = '{own}' returned {type(result).__name__}, not the StepResult of `update`")
    return result


def learn(batch: Batch, roles: Roles) -> StepResult:
    """The dataflow of every built-in algorithm."""
    return update(batch, roles, advantages(batch, roles))


# --- the batch ---------------------------------------------------------------------------------------


def batch_of(drawn: Drawn, config: Config) -> Batch:
    masks = judge(drawn, config)
    members = statistics(drawn, masks, config)
    samples = [
        sample
        for member, mask in zip(flat(drawn), masks, strict=True)
        for sample in samples_of(member.trajectory, mask, member.score.reward or 0.0)
    ]
    return Batch(drawn, config, members, masks, samples)


def flat(drawn: Drawn) -> list[DrawnMember]:
    """The members of all groups, in the order of the draw."""
    return list(chain.from_iterable(group.members for group in drawn.groups))


def statistics(drawn: Drawn, masks: Sequence[Masked], config: Config) -> Members:
    """What advantages are estimated from, without what only some estimators ask for."""
    everyone = flat(drawn)
    sizes = torch.tensor([len(group.members) for group in drawn.groups])
    positions = [np.flatnonzero(sequence.action) for member in everyone for sequence in member.trajectory.sequences]
    lengths = torch.tensor([member.trajectory.sampled for member in everyone])
    votes = torch.tensor([m.score.votes for m in everyone])
    rewards = torch.tensor([m.score.reward or 0.0 for m in everyone], dtype=torch.float64)
    overlong = config.algorithm.overlong
    if overlong is not None:
        penalties = overlong_penalty(lengths, overlong, config.sampling.max_new_tokens)
        rewards = torch.where(votes, rewards + penalties, 0.0)
    return Members(
        rewards=rewards,
        votes=votes,
        groups=torch.arange(len(drawn.groups)).repeat_interleave(sizes),
        lengths=lengths,
        group_size=config.batch.group_size,
        loss=torch.from_numpy(np.concatenate([mask.loss for mask in masks])),
        positions=torch.from_numpy(np.concatenate([own - own[0] for own in positions])),
        token_rewards=torch.zeros(int(lengths.sum()), dtype=torch.float64),
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


# --- what the roles say ------------------------------------------------------------------------------


def with_roles(batch: Batch, roles: Roles) -> Batch:
    """With the critic's values and the reference's log-probabilities, and, where kl.place = "reward", the KL to that
    one in the token rewards; what there is no role for is left out."""
    if roles.critic is not None:
        batch = batch.given(values=roles.critic.values(batch.samples))
    if roles.reference is None:
        return batch
    reference = roles.reference.logprobs(batch.samples)
    settings = batch.config.algorithm.kl
    if settings is not None and settings.place == "reward":
        sampled = torch.where(batch.finite, batch.behaviour, reference)
        rewards = -roles.kl * penalty(sampled, reference, settings.estimator)
        batch = replace(batch, members=replace(batch.members, token_rewards=rewards))
    return batch.given(reference=reference)


def advantages(batch: Batch, roles: Roles) -> Estimate:
    """By the estimator of `algorithm.advantage`; with a teacher, its log-ratio to the sampler added to them."""
    settings = batch.config.algorithm
    chosen = estimator(settings.advantage)
    members = replace(batch.members, **_asked(batch, roles, chosen.needs))
    estimate = chosen.estimate(members, settings.advantage)
    if settings.teacher is not None and settings.teacher.weight:
        gap = settings.teacher.weight * teacher_gap(batch, roles)
        own = torch.zeros_like(gap) if settings.teacher.alone else estimate.advantages
        estimate = replace(estimate, advantages=own + gap)
    return estimate


def teacher_gap(batch: Batch, roles: Roles) -> Tensor:
    """[A] log pi_teacher - log pi_behaviour: minus its mean is the reverse KL to the teacher (on-policy
    distillation, Agarwal et al. 2024, arXiv:2306.13649). 0 where the latter is not known."""
    if roles.teacher is None:
        raise UserError("a step asks for a teacher: set algorithm.teacher.path")
    return torch.where(batch.finite, roles.teacher.logprobs(batch.samples) - batch.behaviour, 0.0)


def _asked(batch: Batch, roles: Roles, needs: Sequence[Need]) -> dict[str, Any]:
    """What an estimator reads of the roles, by the names in Members."""
    found: dict[str, Any] = {}
    if "components" in needs:
        scores = [member.score for member in flat(batch.drawn)]
        names = sorted({name for score in scores for name in score.components})
        found["components"] = {
            name: torch.tensor([score.components.get(name, 0.0) for score in scores], dtype=torch.float64)
            for name in names
        }
    if "greedy" in needs:
        greedy = [group.greedy.score.reward if group.greedy is not None else None for group in batch.drawn.groups]
        found["greedy"] = torch.tensor([float("nan") if r is None else r for r in greedy], dtype=torch.float64)
    if "values" in needs:
        found["values"] = batch.column("values")
    if "old" in needs or "sum_pi_squared" in needs:
        policy = roles.policy
        squares = partial(sum_pi_squared, temperature=batch.config.sampling.temperature)
        found["old"], found["sum_pi_squared"] = policy.read(
            batch.samples,
            lambda pack, logits: [
                policy.of_tokens(pack, logits)[0],
                *logits.read(squares, pack.survivors),
            ],
            2,
        )
        weights = correction(batch.config).weights
        if weights is not None:
            log_r = torch.where(batch.finite, log_ratio(found["old"], batch.behaviour), 0.0)
            members = batch.members
            found["weights"] = importance_weights(log_r, members.loss, members.sequence, len(members.lengths), weights)
    if "implicit" in needs:
        assert roles.reward_model is not None
        found["implicit"] = roles.reward_model.logprobs(batch.samples) - batch.column("reference")
    return found


# --- the updates -------------------------------------------------------------------------------------


def update(batch: Batch, roles: Roles, estimate: Estimate) -> StepResult:
    """The optimizer updates of a step, each role's by its own settings."""
    config, settings = batch.config, batch.config.algorithm
    if not bool(torch.isfinite(estimate.advantages).all()):
        raise InvariantError("an advantage is not finite")
    batch = batch.given(advantages=estimate.advantages.float())
    many = config.batch.epochs * config.batch.mini_batches > 1
    if correction(config).proximal == "recompute" and many:
        batch = batch.given(old=roles.policy.logprobs(batch.samples))
    figures: dict[str, float] = {}
    sizes = [len(group.members) for group in batch.drawn.groups]
    if roles.critic is not None and estimate.returns is not None:
        figures |= _train_critic(batch, roles.critic, estimate.returns, sizes)
    updates: list[Update] = []
    if roles.critic is None or batch.drawn.step >= settings.critic.warmup_steps:
        objective = Objective.of(config, roles.kl if settings.kl is not None and settings.kl.place == "loss" else 0.0)
        trained = batch.by_member()
        if settings.resample is not None:
            drawn_anew = resampled(batch.members, settings.resample, seed=[config.seed, batch.drawn.step])
            trained = [trained[k] for k in drawn_anew.tolist()]
        updates = [
            roles.policy.update(part, objective)
            for _ in range(config.batch.epochs)
            for part in mini_batches(trained, sizes, config.batch.mini_batches)
        ]
    if roles.reward_model is not None:
        made = roles.reward_model.update(batch.samples)
        figures |= {"reward_model_loss": made.loss, "reward_model_accuracy": made.accuracy}
    if settings.kl is not None:
        figures |= _adapt(batch, roles)
    return StepResult(batch.masks, int(zero_variance(batch.members).sum()), updates, figures)


def _train_critic(batch: Batch, critic: Critic, returns: Tensor, sizes: list[int]) -> dict[str, float]:
    config, batch = batch.config, batch.given(returns=returns)
    made = [
        critic.update(part)
        for _ in range(config.algorithm.critic.epochs)
        for part in mini_batches(batch.by_member(), sizes, config.batch.mini_batches)
    ]
    return {
        "value_loss": sum(one.loss for one in made) / len(made),
        "value_clipped": sum(one.clipped for one in made) / len(made),
        "value_explained": explained(batch.column("values"), returns, batch.members.loss),
    }


def explained(values: Tensor, returns: Tensor, loss: Tensor) -> float:
    """Share of the variance of the returns [A] over the tokens in the loss that the values explain; 0 without any."""
    if loss.sum() < 2:
        return 0.0
    spread, left = (x[loss].var(correction=0) for x in (returns, returns - values))
    return float(1 - left / spread) if spread > 0 else 0.0


def _adapt(batch: Batch, roles: Roles) -> dict[str, float]:
    """The mean KL from the reference over this step's samples, and the coefficient with which it was weighed; that
    of the next step follows."""
    settings = batch.config.algorithm.kl
    assert settings is not None
    inside = batch.members.loss & batch.finite
    kl = float((batch.behaviour - batch.column("reference"))[inside].mean()) if inside.any() else 0.0
    figures = {"reference_kl": kl, "kl_coefficient": roles.kl}
    roles.kl = adapted(roles.kl, kl, len(batch.masks), settings)
    return figures


def mini_batches(members: Sequence[list[Sample]], group_sizes: Sequence[int], parts: int) -> list[list[Sample]]:
    """The samples of `members` in at most `parts` runs of whole groups, about equal in groups; none is empty."""
    groups = len(group_sizes)
    ends = [sum(group_sizes[: groups * part // parts]) for part in range(parts + 1)]
    return [list(chain.from_iterable(members[a:b])) for a, b in pairwise(ends) if b > a]
