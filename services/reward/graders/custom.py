"""The user's own grader, named `module:attribute`, importable from the current folder.

It returns a Score, a number, a bool, or None to abstain. An exception, a number that is not finite and any
other value are the status `failed` with the reason: never a reward of 0.
"""

import importlib
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from async_rl.config.schema import CustomGrader
from async_rl.errors import UserError, nearest
from async_rl.services.reward.graders import failed
from async_rl.trajectory import Score, ScoreStatus, Task, Trajectory


class Custom:
    def __init__(self, config: CustomGrader) -> None:
        self._function = load(config.function)

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            value = self._function(task, trajectory)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return failed(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
        return score_of(value)


def load(name: str) -> Callable[[Task, Trajectory], Any]:
    """The function named `module:attribute`; UserError that says what is there instead."""
    setting = f"reward.grader.function = '{name}'"
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"{setting}: write module:attribute")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file of the user's never replaces a library
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{setting}: {module_name} needs the module '{error.name}'") from None
        beside = nearest(module_name, [path.stem for path in Path(here).glob("*.py")])
        raise UserError(f"{setting}: no module '{error.name}' in {here} or installed{beside}") from None
    except Exception as error:  # the user's code runs at import, and any error of it is the user's to mend
        raise UserError(f"{setting}: importing it raises {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{setting}: {module.__file__} has no '{attribute}'{nearest(attribute, names)}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UserError(f"{setting}: write it as a plain `def {attribute}(task, trajectory)`")
    checked: Callable[[Task, Trajectory], Any] = function
    return checked


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
