"""Environments of the `verifiers` library (0.4, `import verifiers.v1`), played through the gateway: its harness is the
agent, our endpoint its model, its own scoring the reward.

    # environment.run = { kind = "agent", function = "my_envs:agent" }
    agent = verifiers_agent(lambda: vf.SingleAgentEnv(config))

Task k of the run is task k of the environment's task set, over and over.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.errors import UserError
from async_rl.trajectory import Task

KEY = "ASYNC_RL_GATEWAY_KEY"  # the gateway asks for none, the library insists on one


class EpisodeFailed(Exception):
    """The library's own account of what went wrong."""


def verifiers_agent(make: Callable[[], Any]) -> Callable[[Task, str], Awaitable[float]]:
    """An agent for the gateway; the environment is made and its servers are started with the first episode."""
    started: asyncio.Future[tuple[Any, list[Any]]] | None = None
    serving = contextlib.AsyncExitStack()

    async def environment() -> tuple[Any, list[Any]]:
        nonlocal started
        if started is None:
            started = asyncio.get_running_loop().create_future()
            made = make()
            await serving.enter_async_context(made.serving())  # until the service ends
            started.set_result((made, list(made.taskset)))
        return await asyncio.shield(started)

    async def agent(task: Task, base_url: str) -> float:
        try:
            import verifiers.v1 as vf
        except ImportError:
            raise UserError("environment.run of verifiers: pip install 'verifiers>=0.4'") from None
        made, tasks = await environment()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=os.environ.setdefault(KEY, KEY))
        episode = await made.run_episode(tasks[task.index % len(tasks)], vf.ModelContext("policy", client))
        if not episode.ok:
            raise EpisodeFailed("; ".join(str(error) for error in episode.errors) or "an agent's run failed")
        rewards = [float(trace.reward) for trace in episode.traces]
        return sum(rewards) / len(rewards)

    return agent
