"""The figures of a step and of an evaluation: one JSON line each in the run's metrics.jsonl.

`policy_loss` is written for debugging only. It is no progress signal: advantages are centred, so it stays
near 0 while the policy learns. Lead with `reward_mean`, the held-out lines and `mismatch_kl_k3`.
"""

import math
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from async_rl.algorithms.kl import Mismatch
from async_rl.config.schema import OnExceed
from async_rl.errors import UserError
from async_rl.protocol.buffer import Drawn, EvaluationReport, SourceScore
from async_rl.rundir import write_atomically
from async_rl.services.trainer.masks import Reason
from async_rl.services.trainer.step import StepResult, flat
from async_rl.trajectory import StopReason, ToolStatus


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """A figure that nothing gives in this step (no voter, no forward pass) is null."""

    step: int
    version: int  # after it
    sequence: int  # how often this draw was trained before
    wall_s: float  # since the trainer's start
    draw_wait_s: float  # idle, until the batch was there
    train_s: float
    group_ids: list[int]  # in the order of the draw
    # rewards, over voting members
    groups: int
    members: int
    voting: int
    reward_mean: float | None
    reward_by_source: dict[str, float]
    zero_variance_share: float  # groups whose voters' rewards were all equal
    held_out: float | None  # the newest evaluation's mean reward, on tasks that are not trained
    held_out_version: int | None
    # staleness, over the tokens in the loss
    lag_mean: float | None
    lag_max: int | None
    lag_histogram: dict[int, int]  # lag -> tokens
    on_exceed: OnExceed
    masked_share: float  # of action tokens, left out of the loss for any reason
    masked_by: dict[Reason, float]  # share of action tokens by reason; `stale` is what on_exceed masked
    dropped_stale: int  # groups so far
    failed: int  # groups so far
    # behaviour policy against the trainer's before its first update, over action tokens that needed a pass
    mismatch_kl_k1: float | None
    mismatch_kl_k3: float | None
    mismatch_by_lag: dict[int, tuple[float, float]]  # lag -> (k1, k3)
    ratio_mean: float | None
    ratio_max: float | None
    effective_sample_size: float | None  # share of the tokens
    # the updates, over tokens in the loss that needed a pass
    entropy: float | None
    clip_fraction: float | None
    gradient_norm: float  # before clipping; mean over the updates
    learning_rate: float | None  # of the last update
    policy_loss: float  # no progress signal
    updates: int
    skipped_updates: int
    skipped: list[str]  # why
    weight_mean: float | None  # of the correction's importance weights
    rejected_share: float  # of the tokens in the loss, by the correction
    reference_kl_k3: float | None  # of the updated policy from the reference, where there is one
    others: dict[str, float]  # figures of the other roles: value_loss, kl_coefficient, ...
    # lengths, in action tokens
    length_mean: float
    length_max: int
    truncated_share: float  # of members that any limit ended
    stops: dict[StopReason, float]  # share of the members by what ended them
    trained_tokens: int
    # episodes
    turns_mean: float
    tools: dict[ToolStatus, int]  # tool calls by how they went
    tool_wall_s: float | None  # mean of a call


class EvaluationRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="evaluation"):
    """Held-out score of exactly `version`; younger than `asked` where that was gone (`restarted` > 0)."""

    version: int
    asked: int
    restarted: int
    mean_reward: float | None  # null where no sample votes
    voting: int
    samples: int
    sources: dict[str, SourceScore]
    wall_s: float  # since the trainer's start

    @classmethod
    def of(cls, report: EvaluationReport, wall_s: float) -> "EvaluationRecord":
        return cls(
            version=report.version,
            asked=report.asked,
            restarted=report.restarted,
            mean_reward=report.mean_reward,
            voting=report.voting,
            samples=report.samples,
            sources=report.sources,
            wall_s=wall_s,
        )


Record = StepRecord | EvaluationRecord


class MetricsFile:
    """One line a record. What an earlier trainer of the run has written is taken over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps: dict[int, StepRecord] = {}
        self.evaluations: dict[int, EvaluationRecord] = {}  # by the version asked for

    def go_on(self, version: int) -> None:
        """Take over what is there of the steps before `version`, and cut off the rest: those steps are still to
        be made. An unfinished last line goes, too."""
        whole = self._path.read_bytes().rpartition(b"\n")[0].splitlines() if self._path.exists() else []
        try:
            records = [msgspec.json.decode(line, type=StepRecord | EvaluationRecord) for line in whole]
        except msgspec.DecodeError as error:
            raise UserError(f"{self._path}: not the metrics of this version: {error}") from None
        kept = [record for record in records if _asked(record) <= version]
        for record in kept:
            self._note(record)
        if whole:
            write_atomically(self._path, "".join(msgspec.json.encode(record).decode() + "\n" for record in kept))

    @property
    def wall_s(self) -> float:
        """Up to the last record."""
        steps, evaluations = self.steps.values(), self.evaluations.values()
        return max([*(step.wall_s for step in steps), *(e.wall_s for e in evaluations)], default=0.0)

    def write(self, record: Record) -> None:
        """Append `record`, unless a step is made again whose line is there."""
        if isinstance(record, StepRecord) and record.step in self.steps:
            return
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        self._note(record)

    def _note(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps[record.step] = record
        else:
            self.evaluations[record.asked] = record


def _asked(record: Record) -> int:
    """The version that a record tells about."""
    return record.version if isinstance(record, StepRecord) else record.asked


def step_record(
    drawn: Drawn,
    result: StepResult,
    *,
    on_exceed: OnExceed,
    wall_s: float,
    draw_wait_s: float,
    train_s: float,
    held_out: EvaluationRecord | None,
) -> StepRecord:
    members = flat(drawn)
    rewards = [m.score.reward for m in members if m.score.reward is not None]
    lags = np.concatenate([mask.lag[mask.loss] for mask in result.masks])
    lengths = [len(mask.loss) for mask in result.masks]
    used = [tool for member in members for tool in member.trajectory.tools]
    left_out: Counter[Reason] = sum((Counter(mask.left_out) for mask in result.masks), start=Counter())
    passed = sum(update.tokens for update in result.updates)
    mismatch = result.updates[0].mismatch if result.updates else Mismatch.none()
    referred = any(update.reference_kl for update in result.updates)
    skipped = [update.skipped for update in result.updates if update.skipped]
    return StepRecord(
        step=drawn.step,
        version=drawn.step + 1,
        sequence=drawn.sequence,
        wall_s=wall_s,
        draw_wait_s=draw_wait_s,
        train_s=train_s,
        group_ids=[group.group for group in drawn.groups],
        groups=len(drawn.groups),
        members=len(members),
        voting=len(rewards),
        reward_mean=mean(rewards),
        reward_by_source=by_source(drawn),
        zero_variance_share=result.equal_groups / len(drawn.groups),
        held_out=held_out.mean_reward if held_out else None,
        held_out_version=held_out.version if held_out else None,
        lag_mean=float(lags.mean()) if len(lags) else None,
        lag_max=int(lags.max()) if len(lags) else None,
        lag_histogram={int(lag): int(n) for lag, n in zip(*np.unique(lags, return_counts=True), strict=True)},
        on_exceed=on_exceed,
        masked_share=left_out.total() / sum(lengths),
        masked_by={reason: count / sum(lengths) for reason, count in left_out.items() if count},
        dropped_stale=drawn.dropped_stale,
        failed=drawn.failed,
        mismatch_kl_k1=known(mismatch.k1),
        mismatch_kl_k3=known(mismatch.k3),
        mismatch_by_lag=mismatch.by_lag(),
        ratio_mean=known(mismatch.mean_ratio),
        ratio_max=mismatch.max_ratio if mismatch.tokens else None,
        effective_sample_size=known(mismatch.effective_sample_size),
        entropy=sum(update.entropy for update in result.updates) / passed if passed else None,
        clip_fraction=sum(update.clipped for update in result.updates) / passed if passed else None,
        gradient_norm=mean([update.gradient_norm for update in result.updates]) or 0.0,
        learning_rate=result.updates[-1].learning_rate if result.updates else None,
        policy_loss=mean([update.loss for update in result.updates]) or 0.0,
        updates=len(result.updates),
        skipped_updates=len(skipped),
        skipped=skipped,
        weight_mean=sum(update.weight for update in result.updates) / passed if passed else None,
        rejected_share=sum(update.rejected for update in result.updates) / max(len(lags) * len(result.updates), 1),
        reference_kl_k3=sum(u.reference_kl for u in result.updates) / passed if passed and referred else None,
        others=result.figures,
        length_mean=sum(lengths) / len(lengths),
        length_max=max(lengths),
        truncated_share=sum(m.trajectory.stop != "eos" for m in members) / len(members),
        stops={stop: n / len(members) for stop, n in Counter(m.trajectory.stop for m in members).items()},
        trained_tokens=len(lags),
        turns_mean=sum(m.trajectory.turns for m in members) / len(members),
        tools=dict(Counter(tool.status for tool in used)),
        tool_wall_s=mean([tool.wall_s for tool in used]),
    )


def by_source(drawn: Drawn) -> dict[str, float]:
    """Mean reward of the voting members of each source."""
    rewards: dict[str, list[float]] = {}
    for group in drawn.groups:
        for member in group.members:
            if member.score.reward is not None:
                rewards.setdefault(group.task.source, []).append(member.score.reward)
    return {source: sum(values) / len(values) for source, values in sorted(rewards.items())}


def known(figure: float) -> float | None:
    """None for what is not a number."""
    return None if math.isnan(figure) else figure


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
