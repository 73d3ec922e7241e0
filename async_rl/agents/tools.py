"""A Python function with type hints is a tool.

    def look_up(city: str, days: Annotated[int, Meta(ge=1, le=7)] = 1) -> str:
        "The weather of a city."

The schema comes from the hints, the description from the docstring; arguments are checked against the hints before the
function is called. A coroutine function runs here and is cancelled at its deadline; a plain one runs in a process that
is killed at its deadline (processes.py), so it must be one that can be imported: `module:function`.

Whatever goes wrong becomes the tool's answer, beginning with "error:", and the episode goes on.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from async_rl.agents.llm import Call, ChatMessage
from async_rl.agents.processes import Processes
from async_rl.errors import UserError
from async_rl.trajectory import ToolStatus, ToolUse
from async_rl.user_code import load

LONGEST = 20_000  # characters of an answer; the rest is left out, and the answer says so


class Tool:
    """One tool. `call` takes the arguments as keywords and gives the answer."""

    def __init__(self, name: str, description: str, parameters: dict[str, Any], call: Callable[..., Awaitable[Any]]):
        self.name = name
        self.spec = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }
        self._call = call

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        return await self._call(**arguments)

    @classmethod
    def of(cls, function: Callable[..., Any], processes: Processes | None = None) -> "Tool":
        """Raises UserError where a parameter has no type hint, or where a plain function cannot be imported."""
        name = function.__name__
        shape = arguments_of(function)
        schema, components = msgspec.json.schema_components([shape], ref_template="#/$defs/{name}")
        parameters = components.pop(shape.__name__, schema[0])
        parameters.pop("title", None)
        if components:
            parameters["$defs"] = components
        description = (inspect.getdoc(function) or name).split("\n\n")[0].replace("\n", " ")
        if inspect.iscoroutinefunction(function):

            async def call(**given: Any) -> Any:
                return await function(**_checked(given, shape))

        else:
            place = importable(function)
            if processes is None:
                raise UserError(f"tool {name}: a plain function needs processes to run in; or make it `async def`")
            pool = processes

            async def call(**given: Any) -> Any:
                _checked(given, shape)
                return await pool.call(place, given)

        return cls(name, description, parameters, call)


def arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The function's parameters as a struct."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {function.__name__}: {name}: a tool takes named arguments alone")
        if name not in hints:
            raise UserError(f"tool {function.__name__}: parameter {name} has no type hint")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, hints[name], *default))
    return msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def importable(function: Callable[..., Any]) -> str:
    """`module:name` of a function that another process can import."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise UserError(f"tool {name}: a plain function runs in another process, so it must be in a module")
    return f"{module}:{name}"


def named(places: Sequence[str], processes: Processes) -> list[Tool]:
    """The tools at `places`, each `module:attribute`: functions, or Tools."""
    found = [load("environment.run.functions", place, "tool(...)", "either") for place in places]
    return [one if isinstance(one, Tool) else Tool.of(one, processes) for one in found]


async def carry_out(call: Call, tools: Mapping[str, Tool], deadline_s: float) -> tuple[ChatMessage, ToolUse]:
    """The tool's answer as a message, and how it went. Never raises for what the policy or the tool did."""
    began = time.monotonic()
    answer, status = await _answer(call, tools, deadline_s)
    message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": answer}
    return message, ToolUse(call.name, status, time.monotonic() - began)


async def _answer(call: Call, tools: Mapping[str, Tool], deadline_s: float) -> tuple[str, ToolStatus]:
    if call.problem or call.arguments is None:
        return f"error: {call.problem}", "malformed"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}; there is {', '.join(sorted(tools)) or 'none'}", "malformed"
    try:
        async with asyncio.timeout(deadline_s):
            return text_of(await tool(call.arguments)), "ok"
    except TimeoutError:
        return f"error: {call.name} took longer than {deadline_s:g} s and was ended", "timeout"
    except msgspec.ValidationError as error:
        return f"error: {error}", "malformed"
    except Exception as error:  # the tool's own: the policy reads it and goes on
        return f"error: {type(error).__name__}: {error}"[:LONGEST], "error"


def text_of(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[{len(text) - LONGEST} characters left out]"


def _checked(given: dict[str, Any], shape: type[msgspec.Struct]) -> dict[str, Any]:
    """`given` as the hints want it, defaults added."""
    made = msgspec.convert(given, shape, strict=False)
    return {name: getattr(made, name) for name in shape.__struct_fields__}
