"""The environment that `environment.run` names, as an episode."""

import contextlib

from async_rl.agents.loop import tool_loop
from async_rl.agents.parsers import PARSERS
from async_rl.agents.processes import Processes
from async_rl.agents.tools import named
from async_rl.config.schema import Adapter, AgentProgram, Config, Environment, EpisodeFunction, ToolLoop
from async_rl.models.text import ChatText
from async_rl.services.rollout.episodes import Episode, Episodes, Policy
from async_rl.trajectory import Task
from async_rl.user_code import load


async def build(config: Config, text: ChatText, context: int, resources: contextlib.AsyncExitStack) -> Episodes | None:
    """The run's episodes, None where a trajectory is one completion. What they open is closed with `resources`."""
    settings = config.environment
    if settings is None:
        return None
    processes = Processes(settings.tool_processes)
    resources.push_async_callback(processes.close)
    parse = PARSERS[text.parser if settings.parser == "auto" else settings.parser]
    episode = await _episode(settings, processes, resources)
    return Episodes(episode, settings, text, parse, context, processes)


async def _episode(settings: Environment, processes: Processes, resources: contextlib.AsyncExitStack) -> Episode:
    match settings.run:
        case EpisodeFunction(function=function):
            return load("environment.run.function", function, "episode(task, llm)", "async def")
        case Adapter(make=make):
            made: Episode = load("environment.run.make", make, "make()")()
            return made
        case ToolLoop() as loop:
            tools = named(loop.functions, processes)
            if loop.mcp:
                from async_rl.agents.adapters.mcp import mcp_tools

                for server in loop.mcp:
                    tools += await resources.enter_async_context(mcp_tools(server))

            async def run(task: Task, llm: Policy) -> None:
                await tool_loop(task, llm, tools, loop.system)

            return run
        case AgentProgram() as program:
            from async_rl.services.rollout.agents import AgentEpisode
            from async_rl.services.rollout.gateway import Gateway

            return AgentEpisode(program, await resources.enter_async_context(Gateway()))
