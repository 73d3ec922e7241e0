"""The stripped completion is the answer, character for character."""

from async_rl.config.schema import ExactGrader
from async_rl.services.reward.graders import without_answer
from async_rl.trajectory import Score, Task, Trajectory


class Exact:
    def __init__(self, config: ExactGrader) -> None:
        self._config = config

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        if task.answer is None:
            return without_answer(task)
        given, wanted = trajectory.text.strip(), task.answer.strip()
        if self._config.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        right = given == wanted
        return Score(
            reward=self._config.correct if right else self._config.wrong,
            components={"accuracy": float(right)},
        )
