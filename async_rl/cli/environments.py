"""What `check` asks of the environment: its functions, its tools, and a grader that goes with it."""

import importlib.util
import shlex
import shutil
from collections.abc import Iterator

from async_rl.agents.processes import Processes
from async_rl.agents.tools import named
from async_rl.config.schema import Adapter, AgentProgram, Config, EpisodeFunction, EpisodeGrader, ToolLoop
from async_rl.errors import UserError
from async_rl.user_code import load


def environment_problems(config: Config) -> Iterator[str]:
    """One line each. What lives in the workers' own environment (rollout.python) is theirs to find."""
    settings = config.environment
    if settings is None:
        if isinstance(config.reward.grader, EpisodeGrader):
            yield "reward.grader.kind = 'episode' takes the reward that an episode gave: there is no [environment]"
        return
    if config.rollout.python:
        return
    try:
        yield from _run(settings.run)
    except UserError as error:
        yield str(error)


def _run(run: EpisodeFunction | ToolLoop | AgentProgram | Adapter) -> Iterator[str]:
    match run:
        case EpisodeFunction(function=function):
            load("environment.run.function", function, "episode(task, llm)", "async def")
        case Adapter(make=make):
            load("environment.run.make", make, "make()")
        case ToolLoop(functions=functions, mcp=mcp):
            tools = named(functions, Processes(1))
            twins = sorted({tool.name for tool in tools if [other.name for other in tools].count(tool.name) > 1})
            if twins:
                yield f"environment.run.functions: two tools have the name '{twins[0]}'"
            if mcp and importlib.util.find_spec("mcp") is None:
                yield "environment.run.mcp: pip install 'mcp>=2'"
            for server in mcp:
                if "://" not in server and shutil.which(shlex.split(server)[0]) is None:
                    yield f"environment.run.mcp = '{server}': no such program"
        case AgentProgram(command=command, function=function):
            if bool(command) == (function is not None):
                yield "environment.run of kind 'agent' has either a command or a function"
            elif command and shutil.which(command[0]) is None:
                yield f"environment.run.command: no program '{command[0]}'"
            elif function is not None:
                load("environment.run.function", function, "agent(task, base_url)", "either")
            if importlib.util.find_spec("aiohttp") is None:
                yield "environment.run of kind 'agent' needs a gateway: pip install aiohttp"
