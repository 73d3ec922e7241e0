"""docs/agents.md and docs/engines.md are executed: the tool is a tool, the episode is played, the TOML is a run's."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from async_rl.agents.processes import Processes
from async_rl.agents.tools import Tool
from async_rl.config import parse
from async_rl.user_code import load
from tests.flow.episode_material import TASK, Script, call_of, run

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def code(tmp_path, monkeypatch):
    tool, episode = blocks("agents.md", "python")
    (tmp_path / "my_tools.py").write_text(tool)
    (tmp_path / "my_episode.py").write_text(episode)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_tools", "my_episode"):
        sys.modules.pop(name, None)


def test_the_tool_on_the_page_is_one(code):
    parameters = Tool.of(load("x", "my_tools:weather", "weather(city)"), Processes(1)).spec["function"]["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["days"] == {"type": "integer", "minimum": 1, "maximum": 7, "default": 1}


def test_the_episode_on_the_page_is_played(code):
    episode = load("x", "my_episode:episode", "episode(task, llm)", "async def")
    script = Script(call_of("count", '{"text": "eeee", "letter": "e"}'), "4")
    made = run(episode, script, TASK)
    assert (made.reward, made.turns) == (1.0, 2)
    assert "\n4\n" in script.text.decode_all(script.prompts[1])


@pytest.mark.parametrize("page", ["agents.md", "engines.md"])
def test_tables_on_the_pages_are_settings(page):
    base = {
        "name": "docs",
        "max_steps": 1,
        "model": {"path": "none"},
        "data": {"train": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
    }
    for block in blocks(page, "toml"):
        parse(base | tomllib.loads(block), page)
