"""The end of a run: summary.json, format 1."""

from collections import Counter
from pathlib import Path

import msgspec

from async_rl.config.modes import bounds
from async_rl.config.schema import Config
from async_rl.protocol.buffer import BufferReport, WorkerStats
from async_rl.rundir import write_atomically
from async_rl.services.trainer.metrics import EvaluationRecord, StepRecord
from async_rl.trajectory import ToolStatus

FORMAT = 1


class HeldOut(msgspec.Struct, frozen=True):
    """Mean reward on the held-out tasks. `before` is version 0's, `after` the last version's."""

    before: float | None
    after: float | None
    curve: list[tuple[int, float]]  # (version, mean reward)


class Groups(msgspec.Struct, frozen=True):
    """Groups by final state; `held` ones become dropped(end) when the run is closed."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    held: int
    conserved: bool  # admitted = trained + dropped + failed + held


class Summary(msgspec.Struct, frozen=True):
    """A figure that nothing gives (no evaluation) is null."""

    format: int
    name: str
    mode: str
    eta: int
    on_exceed: str
    reuse: int
    steps: int
    ended: str  # why: "max_steps", or the buffer's or the stop's reason
    held_out: HeldOut
    reward_first: float | None  # mean over the first and last tenth of the steps
    reward_last: float | None
    groups: Groups
    tokens_generated: int  # of the trajectories that reached the buffer, those of evaluations too
    tokens_trained: int
    tokens_generated_per_s: float
    tokens_trained_per_s: float
    idle_trainer: float  # share of the wall-clock spent waiting for a draw
    idle_rollout: float | None  # share of the rollouts' time without a trajectory in flight
    largest_lag_trained: int | None
    lag_histogram: dict[int, int]  # lag -> tokens in the loss
    mismatch_kl_k1: float | None  # mean of the steps
    mismatch_kl_k3: float | None
    turns_mean: float  # completions of a trajectory
    tools: dict[ToolStatus, int]  # tool calls of what was trained, by how they went
    skipped_updates: int
    failed_publications: int
    wall_s: float
    checkpoint: str | None


def summary(
    config: Config,
    steps: list[StepRecord],
    evaluations: list[EvaluationRecord],
    report: BufferReport,
    *,
    ended: str,
    failed_publications: int,
    wall_s: float,
    generated_s: float,
    checkpoint: Path | None,
) -> Summary:
    """wall_s: from the first draw to the last step; generated_s: to `report`, which counts the last evaluation."""
    limits = bounds(config)
    lags: Counter[int] = sum((Counter(step.lag_histogram) for step in steps), start=Counter())
    trained = sum(step.trained_tokens for step in steps)
    tenth = max(len(steps) // 10, 1)
    return Summary(
        format=FORMAT,
        name=config.name,
        mode=config.mode,
        eta=limits.eta,
        on_exceed=limits.on_exceed,
        reuse=limits.reuse,
        steps=len(steps),
        ended=ended,
        held_out=held_out(evaluations, last=steps[-1].version if steps else 0),
        reward_first=_mean([step.reward_mean for step in steps[:tenth]]),
        reward_last=_mean([step.reward_mean for step in steps[-tenth:]]),
        groups=_groups(report),
        tokens_generated=report.tokens,
        tokens_trained=trained,
        tokens_generated_per_s=report.tokens / generated_s,
        tokens_trained_per_s=trained / wall_s,
        idle_trainer=sum(step.draw_wait_s for step in steps) / wall_s,
        idle_rollout=idle_share(_rollouts(report)),
        largest_lag_trained=max(lags, default=None),
        lag_histogram=dict(sorted(lags.items())),
        mismatch_kl_k1=_mean([step.mismatch_kl_k1 for step in steps]),
        mismatch_kl_k3=_mean([step.mismatch_kl_k3 for step in steps]),
        turns_mean=_mean([step.turns_mean for step in steps]) or 0.0,
        tools=dict(sum((Counter(step.tools) for step in steps), start=Counter[ToolStatus]())),
        skipped_updates=sum(step.skipped_updates for step in steps),
        failed_publications=failed_publications,
        wall_s=wall_s,
        checkpoint=str(checkpoint) if checkpoint else None,
    )


def write(path: Path, value: Summary) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def held_out(evaluations: list[EvaluationRecord], *, last: int) -> HeldOut:
    known = {e.version: e.mean_reward for e in evaluations if e.mean_reward is not None}
    curve = sorted(known.items())
    scores = dict(curve)
    return HeldOut(before=scores.get(0), after=scores.get(last) if last else None, curve=curve)


def idle_share(workers: list[WorkerStats]) -> float | None:
    """Share of the workers' time without work."""
    up = sum(stats.up_s for stats in workers)
    return max(1.0 - sum(stats.busy_s for stats in workers) / up, 0.0) if up else None


def _rollouts(report: BufferReport) -> list[WorkerStats]:
    return [stats for name, stats in report.workers.items() if name.startswith("rollout")]


def _groups(report: BufferReport) -> Groups:
    return Groups(
        admitted=report.admitted,
        trained=report.trained,
        dropped=report.dropped,
        failed=report.failed,
        held=report.held,
        conserved=report.conserved,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
