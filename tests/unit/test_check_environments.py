"""What `check` says of an environment and an engine, before anything starts."""

import json

import pytest

from async_rl.cli.engines import engine_problems
from async_rl.cli.environments import environment_problems
from tests.unit.trainer_material import configuration

TOOLS = "tests.flow.agent_tools"


def told(**tables):
    config = configuration(**tables)
    return [*environment_problems(config), *engine_problems(config)]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"kind": "episode", "function": f"{TOOLS}:add"}, "write it as `async def add(task, llm)"),
        ({"kind": "episode", "function": f"{TOOLS}:wayt"}, "did you mean 'wait'?"),
        ({"kind": "tools", "functions": [f"{TOOLS}:add", f"{TOOLS}:add"]}, "two tools have the name 'add'"),
        ({"kind": "tools", "mcp": ["/nowhere/server --x"]}, "no such program"),
        ({"kind": "agent"}, "either a command or a function"),
        ({"kind": "agent", "command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"kind": "adapter", "make": "nowhere:episode"}, "no module 'nowhere'"),
    ],
)
def test_an_environment_that_cannot_be(run, words):
    (line,) = told(environment={"run": run})
    assert words in line and line.startswith("environment.run")


def test_environments_that_can():
    for run in (
        {"kind": "episode", "function": f"{TOOLS}:wait"},
        {"kind": "tools", "functions": [f"{TOOLS}:add", "async_rl.agents.sandbox:python"]},
        {"kind": "agent", "command": ["python3", "agent.py"]},
    ):
        assert told(environment={"run": run}) == []


def test_the_episodes_grader_needs_an_environment():
    (line,) = told(reward={"grader": {"kind": "episode"}})
    assert "no [environment]" in line


def test_the_workers_interpreter_is_looked_into():
    (line,) = told(rollout={"python": "/nowhere/python", "engine": {"kind": "vllm"}})
    assert "rollout.python = '/nowhere/python': no such interpreter" in line
    (line,) = told(rollout={"engine": {"kind": "vllm"}})
    assert "has no vllm, which engine 'vllm' needs" in line
    assert told(rollout={"engine": {"kind": "sglang", "urls": ["http://localhost:1"]}}) == []


def test_engines_that_cannot_tell_survivors_refuse_truncation():
    (line,) = told(sampling={"top_p": 0.9}, rollout={"engine": {"kind": "sglang", "urls": ["http://localhost:1"]}})
    assert "use top_p = 1" in line


def test_router_replay_needs_an_engine_that_says_what_its_routers_chose():
    replay = {"trainer": {"router_replay": True}}
    (line,) = told(**replay, rollout={"engine": {"kind": "fake"}})
    assert line.startswith("trainer.router_replay = true: engine 'fake' does not say")
    assert line.endswith("'transformers' and 'sglang' do")
    first, _ = told(**replay, rollout={"engine": {"kind": "vllm"}})
    assert first.startswith("trainer.router_replay = true: engine 'vllm' does not say")
    assert told(**replay, rollout={"engine": {"kind": "sglang", "urls": ["http://localhost:1"]}}) == []


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "qwen3_moe", "num_experts": 8}, True),
        ({"model_type": "qwen3_moe", "num_experts": 0}, False),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, True),
        ({"model_type": "mixtral", "num_local_experts": 8}, True),
        ({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "num_experts": 8}}, True),
    ],
)
def test_router_replay_needs_a_model_with_experts(tmp_path, config, fits):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = told(trainer={"router_replay": True}, model={"path": str(tmp_path)})
    refused = f"trainer.router_replay = true: the model in '{tmp_path}', a {config['model_type']}, has no experts"
    assert found == ([] if fits else [refused])
