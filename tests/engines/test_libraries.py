"""Environments of verifiers and OpenEnv, by the real libraries: `make test-libraries`, in an environment of its own.

The two pin versions of openai and mcp that the rest does not have.
"""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from async_rl.agents.adapters.openenv import openenv_episode
from async_rl.agents.adapters.verifiers import verifiers_agent
from async_rl.config.schema import AgentProgram
from async_rl.services.rollout.agents import AgentEpisode
from async_rl.services.rollout.gateway import Gateway
from tests.flow.episode_material import TASK, Script, episodes, run

pytestmark = pytest.mark.libraries

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.messages[-1].content == self.data.answer)

class SumSet(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for k in range(4):
            yield SumTask(SumData(idx=k, prompt=f"{k}+1?", answer=str(k + 1)), self.config.task)

__all__ = ["SumSet"]
"""

SERVER = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Hint(Observation):
    text: str

class Higher(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **_):
        self.secret = 5
        return Hint(text="guess", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **_):
        done = action.number == self.secret
        text = "yes" if done else "higher" if action.number < self.secret else "lower"
        return Hint(text=text, done=done, reward=1.0 if done else -0.1)
    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Higher, Guess, Hint, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.parametrize(("says", "reward"), [("4", 1.0), ("5", 0.0)])
def test_a_verifiers_environment_is_played_through_the_gateway(tmp_path, monkeypatch, says, reward):
    import verifiers.v1 as vf

    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # its harness starts uv

    def make():
        seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "sums"}, agent=seat))

    async def work():
        async with asyncio.timeout(110), Gateway() as gateway:
            episode, script = AgentEpisode(AgentProgram(command=["none"]), gateway), Script(says)
            episode._function = verifiers_agent(make)
            async with episodes(episode, script, retries=0) as made:
                return await made.run(TASK, script, []), script

    made, script = asyncio.run(work())
    assert (made.reward, made.turns, made.text) == (reward, 1, says)
    assert "3+1?" in script.text.decode_all(script.prompts[0])  # task 3 of the run is task 3 of the set


def test_an_openenv_server_is_an_episode(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    port = 18765
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
    try:
        until_up(f"http://127.0.0.1:{port}/health")
        episode = openenv_episode(f"http://127.0.0.1:{port}", act=lambda text: {"number": int(text)})
        script = Script("3", "8", "5")
        made = run(episode, script)
    finally:
        server.kill()
        server.wait()
    assert made.reward == pytest.approx(0.8) and made.turns == 3 and not made.branches
    shown = script.text.decode_all(script.prompts[-1])
    assert "higher" in shown and "lower" in shown


def until_up(url):
    end = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(url, timeout=1)
        except OSError:
            assert time.monotonic() < end, "the server does not come up"
            time.sleep(0.1)
