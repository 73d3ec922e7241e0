"""Environments of the form reset/step as episodes: an observation is a user's turn, the model's reply the action.

    async def reset(seed) -> observation                 async def step(action) -> (observation, reward, done)

gymnasium.py and openenv.py make such pairs; so can you.
"""

from collections.abc import Callable
from typing import Any, Protocol

from async_rl.agents.llm import LLM
from async_rl.trajectory import Task


class Steps(Protocol):
    async def reset(self, seed: int) -> Any:
        """The first observation."""

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        """Observation, reward, whether the environment is done."""

    async def close(self) -> None: ...


class NoAction(Exception):
    """A reply that is no action; the message tells the policy what one is."""


Show = Callable[[Any], str]
"""An observation as the text that the policy reads."""
Act = Callable[[str], Any]
"""A reply as an action; raises NoAction."""


async def play(task: Task, llm: LLM, steps: Steps, show: Show = str, act: Act = str, gamma: float = 1.0) -> float:
    """The discounted sum of the rewards. The task's own messages come first, then what `reset` shows. A reply that is
    no action is answered, and costs a turn: the caps of the environment end what never acts."""
    messages, weight, total = task.chat() if task.text else [], 1.0, 0.0
    try:
        observation, done = await steps.reset(task.index), False
        while not done:
            messages.append({"role": "user", "content": show(observation)})
            reply = await llm.chat(messages)
            messages.append(reply.message)
            try:
                action = act(reply.content)
            except NoAction as problem:
                observation = problem
                continue
            observation, reward, done = await steps.step(action)
            total += weight * reward
            weight *= gamma
    finally:
        await steps.close()
    return total
