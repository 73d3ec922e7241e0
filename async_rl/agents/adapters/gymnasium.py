"""Gymnasium's environments as episodes: anything with its `reset` and `step`, the package itself is not needed.

# environment.run = { kind = "adapter", make = "my_games:episode" }
def episode():
    return gymnasium_episode(lambda task: gymnasium.make("FrozenLake-v1"), show=as_text, act=a_move)
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.agents.adapters.reset_step import Act, Show, play
from async_rl.agents.llm import LLM
from async_rl.trajectory import Task


class Gymnasium:
    """A Steps. The environment's calls block, so each runs in a thread."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def reset(self, seed: int) -> Any:
        observation, _ = await asyncio.to_thread(self._environment.reset, seed=seed)
        return observation

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        observation, reward, terminated, truncated, _ = await asyncio.to_thread(self._environment.step, action)
        return observation, float(reward), bool(terminated or truncated)

    async def close(self) -> None:
        await asyncio.to_thread(self._environment.close)


def gymnasium_episode(
    make: Callable[[Task], Any], *, show: Show = str, act: Act = str, gamma: float = 1.0
) -> Callable[[Task, LLM], Awaitable[float]]:
    """`make`: a fresh environment for each episode. Seeded with the task's index."""

    async def episode(task: Task, llm: LLM) -> float:
        return await play(task, llm, Gymnasium(await asyncio.to_thread(make, task)), show, act, gamma)

    return episode
