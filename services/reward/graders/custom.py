"""The user's own grader, named `module:attribute`, importable from the current folder.

It returns a Score, a number, a bool, or None to abstain. An exception, a number that is not finite and any
other value are the status `failed` with the reason: never a reward of 0.
"""

import math
import numbers
import traceback
from pathlib import Path
from typing import Any, get_args

from async_rl.config.schema import CustomGrader
from async_rl.services.reward.graders import failed
from async_rl.trajectory import Score, ScoreStatus, Task, Trajectory
from async_rl.user_code import load


class Custom:
    def __init__(self, config: CustomGrader) -> None:
        self._function = load("reward.grader.function", config.function, "grade(task, trajectory)")

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            value = self._function(task, trajectory)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return failed(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
        return score_of(value)


def score_of(value: Any) -> Score:
    """`value` as a Score that keeps its promises: finite numbers, a reward exactly where there is a vote."""
    if value is None:
        return Score(reward=None, status="abstained")
    if isinstance(value, numbers.Real):  # int, float, bool, and numpy's
        value = Score(reward=float(value))
    if not isinstance(value, Score):
        return failed(f"the grader returned {type(value).__name__}, neither a Score, a number nor None")
    silent = value.status in ("abstained", "failed")
    if value.status not in get_args(ScoreStatus) or silent != (value.reward is None):
        return failed(f"the grader returned reward {value.reward} with status '{value.status}'")
    try:
        reward = None if value.reward is None else float(value.reward)
        components = {str(key): float(part) for key, part in value.components.items()}
    except (TypeError, ValueError, AttributeError) as error:
        return failed(f"the grader returned a Score of wrong types: {error}")
    for key, part in {"reward": reward, **components}.items():
        if part is not None and not math.isfinite(part):
            return failed(f"the grader returned {key} = {part}")
    return Score(reward=reward, status=value.status, components=components, detail=str(value.detail))
