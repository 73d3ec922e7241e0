"""Environments and tools of other libraries: the real packages, a real MCP server."""

import asyncio
import sys

import pytest

from async_rl.agents.adapters.gymnasium import gymnasium_episode
from async_rl.agents.adapters.mcp import mcp_tools
from async_rl.agents.adapters.reset_step import NoAction
from async_rl.agents.llm import Call
from async_rl.agents.tools import carry_out
from async_rl.errors import UserError
from tests.flow.episode_material import Script, run

gymnasium = pytest.importorskip("gymnasium")


def a_move(text):
    if text not in ("0", "1", "2", "3"):
        raise NoAction("say 0, 1, 2 or 3")
    return int(text)


def test_a_game_of_gymnasium_is_an_episode():
    """FrozenLake without slipping: two steps down, two to the right, one down, one to the right reach the goal."""
    lines = ["1", "north", "1", "2", "2", "1", "2"]
    script = Script(*lines)
    episode = gymnasium_episode(
        lambda task: gymnasium.make("FrozenLake-v1", is_slippery=False), show=lambda o: f"at {o}", act=a_move
    )
    made = run(episode, script)
    assert (made.reward, made.turns, made.stop, made.text) == (1.0, 7, "eos", "2")
    assert not made.branches
    shown = script.text.decode_all(script.prompts[-1])
    assert "say 0, 1, 2 or 3" in shown and "at 14" in shown
    assert shown.startswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>user\nat 0<|im_end|>")


def test_a_game_that_ends_badly_and_one_that_is_never_played():
    episode = gymnasium_episode(lambda task: gymnasium.make("FrozenLake-v1", is_slippery=False), act=a_move)
    fell = run(episode, Script("1", "2"))  # down, right: a hole
    assert (fell.reward, fell.turns) == (0.0, 2)
    idle = run(episode, Script("north"), max_turns=5)
    assert (idle.stop, idle.reward, idle.turns) == ("turns", None, 5)


SERVER = """
from mcp.server import MCPServer
server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@server.tool()
def fail() -> str:
    "Raises."
    raise ValueError("no luck")

server.run("stdio")
"""


def test_the_tools_of_an_mcp_server(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)

    async def work():
        async with asyncio.timeout(60), mcp_tools(f"{sys.executable} {path}") as tools:
            by_name = {tool.name: tool for tool in tools}
            assert by_name["add"].spec["function"]["description"] == "Adds."
            assert by_name["add"].spec["function"]["parameters"]["required"] == ["a", "b"]
            calls = [
                Call("x", "add", {"a": 2, "b": 3}, ""),
                Call("y", "fail", {}, ""),
                Call("z", "add", {"a": "x"}, ""),
            ]
            return [await carry_out(call, by_name, 20.0) for call in calls]

    (sum_, ok), (luck, failed), (_, wrong) = asyncio.run(work())
    assert (sum_["content"], ok.status) == ("5", "ok")
    assert failed.status == "error" and luck["content"].startswith("error: ")
    assert wrong.status == "error"


def test_an_mcp_server_that_is_not_there():
    async def work(server):
        async with asyncio.timeout(30), mcp_tools(server):
            pass

    with pytest.raises(UserError, match=r"environment\.run\.mcp"):
        asyncio.run(work("/nowhere/server"))
    with pytest.raises(UserError, match=r"environment\.run\.mcp"):
        asyncio.run(work("http://127.0.0.1:9/mcp"))
