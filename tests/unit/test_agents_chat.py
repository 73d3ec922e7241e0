"""Token fidelity: what is trained is what was sampled, over templates of five families."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.agents.chat import Chat
from async_rl.agents.llm import Call, message_of
from async_rl.agents.parsers import PARSERS, by_template
from async_rl.agents.recording import Recording
from async_rl.errors import EngineFault
from tests.unit.chat_material import FAMILIES, chat_text

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CONVERSATIONS = 2_000  # of each family
NO_TOOLS = ()


def test_the_parser_of_a_template():
    found = {family: by_template(template) for family, (template, *_) in FAMILIES.items()}
    assert found == {
        "qwen": "hermes",
        "qwen3": "hermes",
        "llama": "llama3",
        "mistral": "mistral",
        "deepseek": "deepseek",
    }
    assert by_template("{{ '<|channel|>final' }}") == "harmony"
    assert by_template("") == "hermes"


def said(chance, text, family, call):
    """A turn's tokens, at random: words, pieces that a tokenizer would have joined, a call, an end or none."""
    tokens = []
    for _ in range(chance.randrange(1, 6)):
        match chance.randrange(3):
            case 0:
                tokens += text.encode_text(chance.choice(["he", "llo", " it", " is", "12", "\n", "  ", "so."]))
            case 1:
                tokens.append(chance.randrange(20, 400))  # any id: what it decodes to need not encode back to it
            case 2:
                tokens += [*text.encode_text("1"), *text.encode_text("2")]
    if call:
        name, raw = f"add{chance.randrange(3)}", f'{{"a":{chance.randrange(99)}}}'
        written = {
            "qwen": f'<tool_call>\n{{"name":"{name}","arguments":{raw}}}\n</tool_call>',
            "qwen3": f'<think>hm</think>\n<tool_call>{{"arguments": {raw}, "name": "{name}"}}</tool_call>',
            "llama": f'{{"name": "{name}", "parameters": {raw}}}',
            "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {raw}}}]',
            "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{raw}<｜tool▁call▁end｜>",
        }[family]
        tokens = text.encode_text(written) if family == "llama" else tokens + text.encode_text(written)
    tokens = [token for token in tokens if token not in text.ends]
    return tokens + ([chance.choice(sorted(text.ends))] if chance.random() < 0.85 else [])


def converse(family, seed):
    """A conversation of the engine's seam with a random policy; what was sampled, in order, and the recording."""
    chance, text = random.Random(seed), chat_text(family)
    chat, recording, parse = Chat(text.render, text.encode_text, text.ends), Recording(), PARSERS[text.parser]
    messages = [{"role": "user", "content": chance.choice(["2+2?", "hello <b>", "Ünïcode ✓", " "])}]
    sampled, turns = [], chance.randrange(1, 6)
    for number in range(turns):
        prompt = chat.prompt(messages, TOOLS)
        completion = said(chance, text, family, call=chance.random() < 0.5)
        ended = completion[-1] in text.ends
        turn = parse(text.decode_all(completion[:-1] if ended else completion))
        calls = [Call(f"c{number:04d}{n:04d}", c.name, c.arguments, c.raw, c.problem) for n, c in enumerate(turn.calls)]
        reply = message_of(turn.content, turn.reasoning, calls)
        if completion:
            recording.add(prompt, completion, [-1.0] * len(completion), [(number, len(completion))])
            sampled.append((prompt, completion))
        chat.replied(messages, TOOLS, reply, prompt + completion)
        messages.append(reply)
        if calls:
            answers = [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": str(seed)} for c in calls]
            messages += answers
        else:
            messages.append({"role": "user", "content": chance.choice(["and then?", "12", "</s>"])})
    return sampled, recording, chat


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_ids_are_sampled_ids_over_random_conversations(family):
    """Field reports 37, 38."""
    rewritten = 0
    for seed in range(CONVERSATIONS):
        sampled, recording, chat = converse(family, seed)
        trajectory = recording.trajectory("eos", "", None)
        assert trajectory.problems() is None
        rewritten += chat.rewritten
        trained = [t for s in trajectory.sequences for t in s.tokens[s.action].tolist()]
        assert sorted(trained) == sorted(t for _, completion in sampled for t in completion)
        for prompt, completion in sampled:  # each call as the engine saw it is the beginning of a sequence
            whole = np.array(prompt + completion)
            (holder,) = [
                s
                for s in trajectory.sequences
                if len(s.tokens) >= len(whole)
                and (s.tokens[: len(whole)] == whole).all()
                and s.action[len(prompt) : len(whole)].all()
            ]
            assert holder.action[: len(whole)].sum() >= len(completion)
    if family in ("qwen", "llama", "mistral", "deepseek"):
        assert rewritten == 0
    else:
        assert rewritten > 0  # the template that drops earlier reasoning


def two_turns(family, first="4", then=None, **settings):
    text = chat_text(family)
    chat = Chat(text.render, text.encode_text, text.ends, **settings)
    messages = [{"role": "user", "content": "2+2?"}]
    prompt = chat.prompt(messages, NO_TOOLS)
    completion = [*text.encode_text(first), sorted(text.ends)[0]]
    reply = then or {"role": "assistant", "content": first}
    chat.replied(messages, NO_TOOLS, reply, prompt + completion)
    return chat, text, [*messages, reply], prompt + completion


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral", "deepseek"])
def test_the_next_prompt_is_what_there_was_and_the_new_suffix(family):
    chat, text, messages, before = two_turns(family, " 4" if family == "mistral" else "4")
    after = chat.prompt([*messages, {"role": "user", "content": "and 3+3?"}], NO_TOOLS)
    assert after[: len(before)] == before
    rendered = text.render([*messages, {"role": "user", "content": "and 3+3?"}], NO_TOOLS, True)
    assert text.decode_all(after) == rendered


@pytest.mark.parametrize("family", ["qwen", "llama", "deepseek"])
def test_a_turn_that_was_cut_is_closed_by_the_template(family):
    chat, text, messages, _ = two_turns(family)
    prompt = chat.prompt(messages[:1], NO_TOOLS)
    cut = text.encode_text("4 an")
    chat.replied(messages[:1], NO_TOOLS, {"role": "assistant", "content": "4 an"}, prompt + cut)
    history = [messages[0], {"role": "assistant", "content": "4 an"}, {"role": "user", "content": "?"}]
    assert text.decode_all(chat.prompt(history, NO_TOOLS)) == text.render(history, NO_TOOLS, True)


def test_a_template_that_rewrites_fails_clearly_where_it_is_asked_to():
    chat, _, messages, _ = two_turns("qwen3", on_rewrite="fail")
    with pytest.raises(EngineFault, match=r"environment\.on_rewrite"):
        chat.prompt([*messages, {"role": "user", "content": "and?"}], NO_TOOLS)


def test_what_a_library_adds_to_a_message_changes_nothing():
    """The openai client sends back what it got with empty fields, and without reasoning."""
    reply = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    chat, _, messages, before = two_turns("qwen", then=reply)
    back = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [{"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
    }
    answer = {"role": "tool", "tool_call_id": "c00000000", "content": "5"}
    assert chat.prompt([messages[0], back, answer], NO_TOOLS)[: len(before)] == before
    assert chat.rewritten == 0


def test_a_chat_that_was_edited_begins_anew():
    chat, text, messages, _ = two_turns("qwen")
    edited = [messages[0], {"role": "assistant", "content": "5"}, {"role": "user", "content": "?"}]
    assert text.decode_all(chat.prompt(edited, NO_TOOLS)) == text.render(edited, NO_TOOLS, True)


def test_a_template_that_raises_is_a_fault_of_this_episode():
    text = chat_text("mistral")
    chat = Chat(text.render, text.encode_text, text.ends)
    call = {"id": "short", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with pytest.raises(EngineFault, match="nine characters"):
        chat.prompt([{"role": "assistant", "content": "", "tool_calls": [call]}], NO_TOOLS)


# --- the recording -----------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_sampled_token_is_an_action_exactly_once(data):
    """Whatever is asked in which order: going on, going back, asking again."""
    recording, made = Recording(), [[]]
    for number in range(data.draw(st.integers(1, 8))):
        known = data.draw(st.sampled_from(made))
        cut = data.draw(st.integers(0, len(known)))
        prompt = [*known[:cut], *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        recording.add(prompt, tokens, [-float(number)] * len(tokens), [(number, len(tokens))])
        made.append(prompt + tokens)
        assert any(branch.tokens[: len(made[-1])] == made[-1] for branch in recording.branches)
    trajectory = recording.trajectory("eos", "", None)
    assert trajectory.problems() is None
    assert trajectory.turns == len(made) - 1
    assert trajectory.sampled == sum(trajectory.turns and s.actions for s in trajectory.sequences)
    by_version = {}
    for sequence in trajectory.sequences:
        at = np.flatnonzero(sequence.action)
        for version, count in sequence.versions:
            by_version[version] = by_version.get(version, 0) + count
            assert set(sequence.logprobs[at[:count]].tolist()) == {-float(version)}
            at = at[count:]
    assert by_version == dict(recording_counts(recording))


def recording_counts(recording):
    totals = {}
    for branch in recording.branches:
        for version, count in branch.versions:
            totals[version] = totals.get(version, 0) + count
    return totals


def test_parallel_calls_from_one_point_share_what_was_before():
    recording = Recording()
    recording.add([1, 2], [3, 4], [-1.0] * 2, [(0, 2)])
    recording.add([1, 2, 3, 4, 5], [6], [-1.0], [(0, 1)])
    recording.add([1, 2, 3, 4, 7], [8], [-1.0], [(1, 1)])
    first, second = recording.trajectory("eos", "", 1.0).sequences
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.tokens.tolist() == [1, 2, 3, 4, 7, 8]
    assert second.action.tolist() == [False] * 5 + [True]
