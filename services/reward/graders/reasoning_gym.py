"""The score of the task's own reasoning-gym data set, in [0, 1]."""

import functools
import importlib
import json
from typing import Any

from async_rl.data.gym import create, unpack
from async_rl.services.reward.graders import failed
from async_rl.trajectory import Score, Task, Trajectory


class ReasoningGym:
    def __init__(self) -> None:
        importlib.import_module("reasoning_gym")  # takes a second, which is no answer's time

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        """What stands in the last <answer></answer> counts, or else the whole completion, stripped."""
        if not {"dataset", "config", "entry"} <= task.metadata.keys():
            return failed(f"task {task.index} of '{task.source}' was not made by reasoning-gym")
        data_set = _data_set(task.metadata["dataset"], json.dumps(task.metadata["config"], sort_keys=True))
        entry = unpack(task.metadata["entry"])
        try:
            score = float(data_set.score_answer(answer_in(trajectory.text), entry))
        except Exception as error:  # several sets raise on answers that they cannot read
            return _unreadable(data_set, entry, error)
        return Score(reward=score, components={"accuracy": float(score >= 1.0)})


def answer_in(text: str) -> str:
    opened, closed = text.rfind("<answer>"), text.rfind("</answer>")
    return (text[opened + len("<answer>") : closed] if 0 <= opened < closed else text).strip()


def _unreadable(data_set: Any, entry: dict[str, Any], error: Exception) -> Score:
    """The policy's doing where the data set can score its own answer, and a fault of the task otherwise."""
    detail = f"{type(error).__name__}: {error}"
    try:
        data_set.score_answer(entry["answer"], entry)
    except Exception as own:
        return failed(f"the data set cannot score its own answer: {type(own).__name__}: {own}")
    return Score(reward=0.0, status="unparsed", components={"accuracy": 0.0}, detail=detail)


@functools.lru_cache(maxsize=16)
def _data_set(name: str, config: str) -> Any:
    return create(name, json.loads(config))
