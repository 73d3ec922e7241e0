"""The reward that an episode gave itself."""

from async_rl.config.schema import EpisodeGrader
from async_rl.trajectory import Score, Task, Trajectory


class Episode:
    def __init__(self, config: EpisodeGrader) -> None:
        self._config = config

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.reward is not None:
            return Score(reward=trajectory.reward)
        if trajectory.stop in ("eos", "length"):
            return Score(reward=None, status="abstained", detail="the episode gave no reward")
        return Score(reward=self._config.cut, detail=f"ended by {trajectory.stop}")
