"""Tool calls as model families write them; what cannot be read is a call with a problem (field report 39)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.agents.parsers import PARSERS, deepseek, harmony, hermes, llama3, mistral

ADD = ("add", {"a": 1})


def read(turn):
    return turn.content, turn.reasoning, [(call.name, call.arguments) for call in turn.calls]


@pytest.mark.parametrize(
    ("parse", "text", "content", "reasoning", "calls"),
    [
        (hermes, "plain", "plain", "", []),
        (hermes, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", "", [ADD]),
        (hermes, 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "I add.", "", [ADD]),
        (hermes, '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", "", [ADD]),  # cut before the end
        (hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [ADD]),
        (hermes, '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
        (
            hermes,
            '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            "",
            "hm",
            [ADD, ("now", {})],
        ),
        (hermes, "hm</think>so", "so", "hm", []),  # the template has opened the thought
        (hermes, "<think>hm, and on and on", "", "hm, and on and on", []),  # cut inside
        (llama3, "plain {x}", "plain {x}", "", []),
        (llama3, '{"name": "add", "parameters": {"a": 1}}', "", "", [ADD]),
        (llama3, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now"}', "", "", [ADD, ("now", {})]),
        (
            deepseek,
            'I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I add.",
            "",
            [ADD, ("now", {})],
        ),
        (
            deepseek,
            "<think>hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            "hm",
            [ADD],
        ),
        (
            harmony,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "",
            "hm",
            [ADD],
        ),
        (
            harmony,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4",
            "4",
            "hm",
            [],
        ),
        (harmony, "no channel at all", "no channel at all", "", []),
        (mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]', "", "", [ADD, ("now", {})]),
        (mistral, 'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "I add.", "", [ADD, ("now", {})]),
        (mistral, 'x[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "x", "", [ADD]),
    ],
)
def test_a_turn_as_the_family_writes_it(parse, text, content, reasoning, calls):
    assert read(parse(text)) == (content, reasoning, calls)


WRITTEN = {
    "hermes": '<tool_call>{{"name": "run", "arguments": {raw}}}</tool_call>',
    "llama3": '{{"name": "run", "parameters": {raw}}}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{raw}<｜tool▁call▁end｜>",
    "harmony": "<|channel|>commentary to=functions.run<|message|>{raw}<|call|>",
    "mistral": "[TOOL_CALLS]run[ARGS]{raw}",
}


MARKS = [piece for text in WRITTEN.values() for piece in text.split("{raw}")]
PIECES = st.sampled_from(MARKS) | st.text('{}[]":,a1 <>|｜▁\n', max_size=4)


@pytest.mark.parametrize("raw", ['{"cmd": "ls"', "null", "[1]", '{"a":1}{"a":1}'])
@pytest.mark.parametrize("family", WRITTEN)
def test_arguments_that_are_no_object_are_a_problem(family, raw):
    turn = PARSERS[family](WRITTEN[family].format(raw=raw))
    assert turn.calls and all(call.problem and call.arguments is None for call in turn.calls[:1])


@pytest.mark.parametrize("family", PARSERS)
@given(pieces=st.lists(PIECES, max_size=12))
def test_no_text_raises(family, pieces):
    for call in PARSERS[family]("".join(pieces)).calls:
        assert bool(call.problem) == (call.arguments is None)


@pytest.mark.parametrize("family", PARSERS)
@given(arguments=st.dictionaries(st.text("ab", min_size=1, max_size=3), st.integers() | st.text("xyz é", max_size=5)))
def test_what_is_written_is_read(family, arguments):
    turn = PARSERS[family](WRITTEN[family].format(raw=json.dumps(arguments)))
    assert [(call.name, call.arguments, call.problem) for call in turn.calls] == [("run", arguments, "")]
