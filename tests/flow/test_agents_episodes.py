"""Episodes: what the policy sees, what is written down, what ends them."""

import asyncio

import pytest

from async_rl.agents.llm import EpisodeOver
from async_rl.agents.loop import tool_loop
from async_rl.config.schema import EpisodeGrader
from async_rl.errors import EngineDied, EngineFault
from async_rl.services.reward.graders.episode import Episode as Grader
from tests.flow import agent_tools
from tests.flow.episode_material import TASK, Script, call_of, run


async def calculator(task, llm):
    await tool_loop(task, llm, [llm.tool(agent_tools.add), llm.tool(agent_tools.wait)])
    return 1.0


def grade(trajectory, cut=0.0):
    return Grader(EpisodeGrader(cut=cut)).grade(TASK, trajectory)


def test_a_tool_loop_is_one_sequence_whose_actions_are_what_was_sampled():
    script = Script(call_of("add", '{"a": 2, "b": 2}'), "it is 4")
    made = run(calculator, script)
    assert made.problems() is None and not made.branches
    assert (made.turns, made.stop, made.text, made.reward) == (2, "eos", "it is 4", 1.0)
    assert made.tokens[made.action].tolist() == script.sampled[0] + script.sampled[1]
    assert made.tokens.tolist() == script.prompts[1] + script.sampled[1]
    assert "<tool_response>\n4\n</tool_response>" in script.text.decode_all(script.prompts[1])
    assert [(tool.name, tool.status) for tool in made.tools] == [("add", "ok")]
    assert grade(made).reward == 1.0


def test_sampled_pieces_stay_what_they_were_through_a_tool_turn():
    """Field report 37: a tokenizer would join the pieces; the next prompt begins with those that were sampled."""
    script = Script("x")
    text = script.text
    pieces = [*text.encode_text("he"), *text.encode_text("llo"), *text.encode_text(call_of("add", '{"a": 1}'))]
    said = [[*pieces, min(text.ends)], [*text.encode_text("done"), min(text.ends)]]

    async def sample(prompt, limit, call, draft):
        script.prompts.append(prompt)
        from async_rl.services.rollout.engine import Completion

        return Completion(said[call], [-1.0] * len(said[call]), [(0, len(said[call]))], "eos")

    sample.text = text
    made = run(calculator, sample)
    first = script.prompts[0] + said[0]
    assert script.prompts[1][: len(first)] == first
    assert made.tokens[made.action].tolist() == said[0] + said[1]


def test_malformed_calls_are_answered_and_end_the_episode_in_the_end():
    """Field reports 39, 40."""
    script = Script('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>')
    made = run(calculator, script, max_invalid_turns=3)
    assert (made.stop, made.turns, made.reward) == ("invalid", 3, None)
    assert "error: not valid JSON" in script.text.decode_all(script.prompts[1])
    assert {tool.status for tool in made.tools} == {"malformed"}
    assert grade(made, cut=-0.5).reward == -0.5 and grade(made).votes


def test_a_turn_cap_by_default():
    """Field report 40."""
    made = run(calculator, Script(call_of("add", '{"a": 1}')))
    assert (made.stop, made.turns) == ("turns", 16)


def test_a_cap_on_the_tokens_of_an_episode():
    script = Script(call_of("add", '{"a": 1}'))
    made = run(calculator, script, max_tokens=60)
    assert made.stop == "tokens" and made.sampled <= 60
    assert script.limits[0] == 60


def test_a_full_context_ends_the_episode():
    async def grow(task, llm):
        tokens = llm.encode("a")
        while True:
            tokens += (await llm.generate(tokens)).tokens + llm.encode("b" * 500)

    made = run(grow, Script("x"))
    assert made.stop == "context" and made.turns > 1


def test_time_is_a_cap_of_its_own():
    script = Script(call_of("wait", '{"seconds": 3600}'), "late")
    made = run(calculator, script, timeout_s=1.0)
    assert (made.stop, made.turns) == ("deadline", 1)
    slow = run(calculator, script, tool_timeout_s=0.2)
    assert (slow.stop, [tool.status for tool in slow.tools]) == ("eos", ["timeout"])
    assert "took longer than 0.2 s" in script.text.decode_all(script.prompts[-1])


def test_an_episode_may_catch_a_cap_and_give_its_reward():
    async def careful(task, llm):
        try:
            await calculator(task, llm)
        except EpisodeOver as over:
            return {"turns": 0.25}[over.stop]

    made = run(careful, Script(call_of("add", '{"a": 1}')), max_turns=2)
    assert (made.stop, made.reward) == ("turns", 0.25)


def test_branches_parallel_calls_and_a_sub_agent():
    async def many(task, llm):
        chat = task.chat()
        first = await llm.chat(chat)
        chat.append(first.message)
        questions = [{"role": "user", "content": text} for text in ("a?", "b?")]
        await asyncio.gather(*(llm.chat([*chat, question]) for question in questions))
        await llm.chat([{"role": "system", "content": "You judge."}, *chat])
        return 0.5

    script = Script("one", "two", "three", "four")
    made = run(many, script)
    assert made.problems() is None
    assert made.turns == 4 and len(made.sequences) == 3
    assert made.sampled == sum(map(len, script.sampled))
    trunk, branch, agent = made.sequences
    shared = len(script.prompts[0]) + len(script.sampled[0])
    assert trunk.tokens[:shared].tolist() == branch.tokens[:shared].tolist()
    assert trunk.action[:shared].any() and not branch.action[:shared].any()
    assert agent.actions == len(script.sampled[3])


def test_an_environment_that_raises_is_begun_anew():
    """Field report 47."""
    tries = []

    async def shaky(task, llm):
        tries.append(task.index)
        await llm.chat(task.chat())
        if len(tries) == 1:
            raise ConnectionError("the sandbox is gone")
        return 1.0

    made = run(shaky, Script("4"))
    assert len(tries) == 2 and made.turns == 1

    async def broken(task, llm):
        raise ConnectionError("the sandbox is gone")

    with pytest.raises(ConnectionError):
        run(broken, Script("4"), retries=2)


def test_a_dead_engine_is_no_matter_of_the_environment():
    with pytest.raises(EngineDied):
        run(calculator, Script(EngineDied("gone")))
    with pytest.raises(EngineFault, match="sampled nothing"):
        run(silent, Script("x"), retries=0)


async def silent(task, llm):
    return 1.0


def test_no_reward_is_an_abstention_for_the_episodes_grader_and_open_to_any_other():
    async def quiet(task, llm):
        await llm.chat(task.chat())

    made = run(quiet, Script("4"))
    assert made.reward is None and made.text == "4"
    assert grade(made).status == "abstained"
