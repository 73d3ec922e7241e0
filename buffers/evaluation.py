"""An evaluation's tallies: what is kept of the held-out samples, and the report made of them."""

from collections.abc import Sequence

from msgspec import Struct, field

from async_rl.buffers.group import Outline
from async_rl.protocol.buffer import EvaluationReport, SourceScore
from async_rl.trajectory import Score, Task


class Mark(Struct, frozen=True):
    """One sample. `reward` None: it abstains."""

    reward: float | None
    truncated: bool

    @classmethod
    def of(cls, trajectory: Outline | None, score: Score | None) -> "Mark":
        return cls(None if score is None else score.reward, trajectory is not None and trajectory.truncated)


class Evaluation(Struct):
    """`asked`: the version it was asked for; `version`: what is sampled, younger where that one was gone."""

    asked: int
    version: int
    restarted: int
    tasks: int
    marks: dict[int, list[Mark]] = field(default_factory=dict)  # by position among the held-out tasks

    @property
    def done(self) -> bool:
        return len(self.marks) == self.tasks


def report(evaluation: Evaluation, tasks: Sequence[Task]) -> EvaluationReport:
    """The mean over voting samples, in all and by source. `tasks`: the held-out ones, in order."""
    by_source: dict[str, list[list[Mark]]] = {}
    for position, marks in sorted(evaluation.marks.items()):
        by_source.setdefault(tasks[position].source, []).append(marks)
    every = [mark for marks in evaluation.marks.values() for mark in marks]
    return EvaluationReport(
        asked=evaluation.asked,
        version=evaluation.version,
        restarted=evaluation.restarted,
        samples=len(every),
        voting=sum(mark.reward is not None for mark in every),
        mean_reward=_mean(every),
        sources={source: _score(marked) for source, marked in by_source.items()},
    )


def _score(marked: list[list[Mark]]) -> SourceScore:
    samples = [mark for marks in marked for mark in marks]
    truncated = sum(mark.truncated for mark in samples) / len(samples) if samples else 0.0
    return SourceScore(tasks=len(marked), mean_reward=_mean(samples), truncated=truncated)


def _mean(marks: list[Mark]) -> float | None:
    rewards = [mark.reward for mark in marks if mark.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
