"""Graders: `grade(task, trajectory) -> Score`. Each runs in a process of its own, which may be killed.

What the policy caused (a wrong answer, one that does not parse) is a reward and votes. What it did not cause
(a task without an answer, an error inside a grader) is the status `failed`, which has no vote.
"""

from typing import Protocol

from async_rl.config import schema
from async_rl.trajectory import Score, Task, Trajectory


class Grader(Protocol):
    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        """Never raises for what the policy wrote."""
        ...


def build(config: schema.Grader) -> Grader:
    """The grader of `reward.grader`; UserError where the user's own cannot be imported."""
    match config:
        case schema.ExactGrader():
            from async_rl.services.reward.graders.exact import Exact

            return Exact(config)
        case schema.MathGrader():
            from async_rl.services.reward.graders.math import Math

            return Math(config)
        case schema.ReasoningGymGrader():
            from async_rl.services.reward.graders.reasoning_gym import ReasoningGym

            return ReasoningGym()
        case schema.EpisodeGrader():
            from async_rl.services.reward.graders.episode import Episode

            return Episode(config)
        case schema.CustomGrader():
            from async_rl.services.reward.graders.custom import Custom

            return Custom(config)


def failed(detail: str) -> Score:
    """No verdict: the fault is not the policy's."""
    return Score(reward=None, status="failed", detail=detail)


def without_answer(task: Task) -> Score:
    return failed(f"task {task.index} of '{task.source}' has no answer to compare with")
