"""What training adds to the agent of openai_agent.py: its endpoint, and a reward for its answer."""

from functools import cache

from openai import AsyncOpenAI

from async_rl.trajectory import Task
from recipes.agents.openai_agent import solve


@cache
def client() -> AsyncOpenAI:
    """One pool of connections for all episodes."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def agent(task: Task, base_url: str) -> float:
    answer = await solve(task.text.removeprefix("user: "), client().with_options(base_url=base_url))
    return float(answer.strip() == task.answer)
