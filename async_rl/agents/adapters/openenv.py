"""OpenEnv's environment servers as episodes (`pip install openenv-core`): observations and actions are JSON objects.

# environment.run = { kind = "adapter", make = "my_envs:episode" }
def episode():
    return openenv_episode("http://localhost:8000", act=lambda text: {"code": text})
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.agents.adapters.reset_step import Act, Show, play
from async_rl.agents.llm import LLM
from async_rl.errors import UserError
from async_rl.trajectory import Task


class OpenEnv:
    """A Steps over the session that `client` (an EnvClient) holds open."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def reset(self, seed: int) -> Any:
        return (await self._client.reset(seed=seed)).observation

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        result = await self._client.step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        await self._client.close()


def openenv_episode(
    url: str, *, show: Show = json.dumps, act: Act = json.loads, gamma: float = 1.0
) -> Callable[[Task, LLM], Awaitable[float]]:
    """Each episode has a session of its own with the server at `url`."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError:
        raise UserError("environment.run of OpenEnv: pip install openenv-core") from None

    async def episode(task: Task, llm: LLM) -> float:
        client = GenericEnvClient(base_url=url)
        await client.connect()
        return await play(task, llm, OpenEnv(client), show, act, gamma)

    return episode
