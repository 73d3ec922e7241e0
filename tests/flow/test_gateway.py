"""The gateway, by the official clients: what they see, and that the trajectory is what went through."""

import asyncio
import json
import sys

import aiohttp
import anthropic
import openai
import pytest

from async_rl.config.schema import AgentProgram
from async_rl.errors import ConfigError, EngineDied, EngineFault
from async_rl.services.rollout.agents import AgentEpisode, AgentFailed
from async_rl.services.rollout.gateway import Gateway
from tests.flow.episode_material import TASK, Script, call_of, episodes

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = call_of("add", '{"a": 2, "b": 2}')


def drive(agent, script, **settings):
    """The trajectory of an agent that is a function of (task, base_url)."""
    return program(script, function=agent, **settings)


def program(script, *, function=None, command=(), **settings):
    async def work():
        async with asyncio.timeout(60), Gateway() as gateway:
            episode = AgentEpisode(AgentProgram(command=["none"] if function else list(command)), gateway)
            if function:
                episode._function = function
            async with episodes(episode, script, **settings) as made:
                return await made.run(TASK, script, [])

    return asyncio.run(work())


def test_an_openai_agent_with_tools():
    def agent(task, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": task.text}]
        for _ in range(4):
            answer = client.chat.completions.create(model="any", messages=messages, tools=[ADD], temperature=0.3)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                assert answer.choices[0].finish_reason == "stop"
                return float(message.content == "4")
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})

    script = Script(CALL, "4")
    made = drive(agent, script)
    assert (made.reward, made.turns, made.stop) == (1.0, 2, "eos")
    assert not made.branches and made.problems() is None
    assert made.tokens[made.action].tolist() == script.sampled[0] + script.sampled[1]


def test_an_async_agent_that_streams_and_asks_for_log_probabilities():
    async def agent(task, base_url):
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": task.text}]
        text = ""
        async for chunk in await client.chat.completions.create(model="any", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        answer = await client.chat.completions.create(model="any", messages=messages, logprobs=True, max_tokens=7)
        assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
        assert (await client.models.list()).data[0].id == "policy"
        return 0.5

    script = Script("four", "yes")
    made = drive(agent, script)
    assert (made.reward, made.turns, len(made.branches)) == (0.5, 2, 0)
    assert script.limits == [None, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_an_anthropic_agent_with_tools(stream):
    def agent(task, base_url):
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
        tool = {"name": "add", "description": "adds", "input_schema": ADD["function"]["parameters"]}
        messages = [{"role": "user", "content": task.text}]
        asked = {"model": "any", "max_tokens": 100, "system": "Add.", "tools": [tool]}
        for _ in range(4):
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason == "end_turn":
                return float(answer.content[0].text == "4")
            assert answer.stop_reason == "tool_use"
            used = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
                for block in used
            ]
            messages.append({"role": "user", "content": results})

    script = Script(CALL, "4")
    made = drive(agent, script)
    assert (made.reward, made.turns, len(made.branches)) == (1.0, 2, 0)
    assert made.tokens[made.action].tolist() == script.sampled[0] + script.sampled[1]


PROGRAM = """
import os, json, urllib.request, openai
task = json.loads(os.environ["ASYNC_RL_TASK"])
answer = openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": task["prompt"]}])
told = json.dumps({"reward": float(answer.choices[0].message.content == task["answer"])}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["ASYNC_RL_EPISODE"] + "/reward", told, method="POST"))
"""


def test_a_program_of_its_own_that_posts_its_reward():
    made = program(Script("4"), command=[sys.executable, "-c", PROGRAM])
    assert (made.reward, made.turns) == (1.0, 1)


def test_a_program_that_fails_is_begun_anew_and_then_said():
    with pytest.raises(AgentFailed, match=r"ended with status 1: .*no such luck"):
        program(Script("4"), command=[sys.executable, "-c", "raise SystemExit('no such luck')"])


def test_a_cap_ends_an_agent_that_goes_on():
    def endless(task, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        while True:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "again"}])

    made = drive(endless, Script("4"), max_turns=3)
    assert (made.stop, made.turns, made.reward) == ("turns", 3, None)


def test_what_would_change_the_distribution_is_refused_by_name():
    async def agent(task, base_url):
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        ask = client.chat.completions.create
        messages = [{"role": "user", "content": "hi"}]
        for key, value in {"stop": ["x"], "response_format": {"type": "json_object"}, "frequency_penalty": 1.0}.items():
            with pytest.raises(openai.BadRequestError, match=key):
                await ask(model="any", messages=messages, **{key: value})
        picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
        with pytest.raises(openai.BadRequestError, match="image_url"):
            await ask(model="any", messages=[{"role": "user", "content": picture}])
        await ask(model="any", messages=messages, presence_penalty=0)
        return 1.0

    assert drive(agent, Script("4")).turns == 1


def test_garbage_and_strangers_are_answered():
    async def agent(task, base_url):
        base = base_url.removesuffix("/v1")
        async with aiohttp.ClientSession() as client:
            for path, body in (
                ("/v1/chat/completions", b"\xff{"),
                ("/v1/chat/completions", b"[]"),
                ("/v1/chat/completions", b'{"messages": 3}'),
                ("/v1/chat/completions", b'{"messages": [{"content": "no role"}]}'),
                ("/v1/chat/completions", b'{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}'),
                ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [3]}'),
                ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}'),
                ("/v1/messages", b'{"messages": ["x"]}'),
                ("/v1/messages", b'{"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}'),
                ("/v1/messages", b'{"messages": [{"role": "user", "content": 3}], "max_tokens": 5}'),
                ("/reward", b'{"reward": "much"}'),
                ("/reward", b"{}"),
            ):
                async with client.post(base + path, data=body) as answer:
                    assert answer.status == 400, (path, body)
                    assert (await answer.json())["error"]["message"]
            stranger = base.rpartition("/")[0] + "/someone/v1/chat/completions"
            async with client.post(stranger, json={"messages": [{"role": "user", "content": "x"}]}) as answer:
                assert answer.status == 400
            async with client.get(base + "/task") as answer:
                assert (await answer.json())["prompt"] == task.prompt
        await openai.AsyncOpenAI(base_url=base_url, api_key="none").chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}]
        )
        return 1.0

    assert drive(agent, Script("4")).turns == 1


def test_an_agent_is_a_command_or_a_function():
    with pytest.raises(ConfigError, match="either a command or a function"):
        AgentEpisode(AgentProgram(), Gateway())


def test_a_dead_engine_ends_the_worker_whatever_the_agent_makes_of_it():
    def stubborn(task, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(EngineDied, match="gone"):
        drive(stubborn, Script(EngineDied("gone")))


def test_when_the_episode_is_over_nothing_is_sampled_for_it():
    script = Script("x", delay_s=30.0)

    async def agent(task, base_url):
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(EngineFault, match="sampled nothing"):
        drive(agent, script, timeout_s=0.5, retries=0)
    assert script.prompts == []
