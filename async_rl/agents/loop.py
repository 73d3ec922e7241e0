"""The usual loop of an agent: the model calls tools until it answers without one."""

from collections.abc import Sequence

from async_rl.agents.llm import LLM
from async_rl.agents.tools import Tool
from async_rl.trajectory import Task


async def tool_loop(task: Task, llm: LLM, tools: Sequence[Tool], system: str = "") -> None:
    """Leaves the reward to the grader. Caps end it from outside (EpisodeOver)."""
    messages = task.chat()
    if system:
        messages.insert(0, {"role": "system", "content": system})
    while True:
        reply = await llm.chat(messages, tools=tools)
        messages.append(reply.message)
        if not reply.calls:
            return
        messages += await llm.run(reply.calls, tools)
