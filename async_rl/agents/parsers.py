"""A turn of the model as content, reasoning and tool calls, by the formats that model families write.

    hermes     <tool_call>{"name": .., "arguments": {..}}</tool_call>          Hermes, Qwen
    llama3     {"name": .., "parameters": {..}}, maybe behind <|python_tag|>   Llama 3
    deepseek   <｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>      DeepSeek V3, R1
    harmony    <|channel|>commentary to=functions.name <|message|>{..}          GPT-OSS
    mistral    [TOOL_CALLS][{"name": .., "arguments": {..}}], or name[ARGS]{..}

A call that cannot be read is a call with a problem, never an exception: the policy is told so and goes on. Pure.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from async_rl.agents.llm import Call


class Turn(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]


Parse = Callable[[str], Turn]
THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def hermes(text: str) -> Turn:
    content, reasoning = _thought(text)
    parts = re.split(r"<tool_call>", content)
    calls = [_named(part.split("</tool_call>")[0], n, "arguments") for n, part in enumerate(parts[1:])]
    after = "".join(part.partition("</tool_call>")[2] for part in parts[1:])
    return Turn((parts[0] + after).strip(), reasoning, calls)


def llama3(text: str) -> Turn:
    content, reasoning = _thought(text)
    body = content.strip()
    marked = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not marked and not re.match(r'\{\s*"(name|type)"\s*:', body):
        return Turn(body, reasoning, [])
    return Turn("", reasoning, [_named(part, n, "parameters", "arguments") for n, part in enumerate(_objects(body))])


def deepseek(text: str) -> Turn:
    content, reasoning = _thought(text)
    before, begun, rest = content.partition("<｜tool▁calls▁begin｜>")
    if not begun:
        before, begun, rest = content.partition("<｜tool▁call▁begin｜>")
        rest = begun + rest
    calls: list[Call] = []
    for n, part in enumerate(rest.split("<｜tool▁call▁begin｜>")[1:]):
        head, separated, body = part.split("<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
        if head.strip() == "function":  # V3: function<sep>name, and the arguments in a fenced block
            head, _, body = body.partition("\n")
            body = re.sub(r"\A\s*```(?:json)?\s*|\s*```\s*\Z", "", body)
        problem = "" if separated else "no <｜tool▁sep｜> between name and arguments"
        calls.append(_call(n, head.strip(), body.strip(), problem))
    return Turn(before.strip(), reasoning, calls)


HARMONY = re.compile(
    r"<\|channel\|>(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL
)


def harmony(text: str) -> Turn:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for message in HARMONY.finditer(text):
        head, body = message["head"], message["body"]
        addressed = re.search(r"to=(?:functions\.)?([\w.-]+)", head)
        if addressed:
            calls.append(_call(len(calls), addressed[1], body.strip()))
        elif head.split()[:1] == ["final"]:
            content.append(body)
        else:
            reasoning.append(body)
    if not HARMONY.search(text):
        content.append(text)
    return Turn("".join(content).strip(), "\n".join(reasoning).strip(), calls)


def mistral(text: str) -> Turn:
    content, reasoning = _thought(text)
    before, *parts = content.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in map(str.strip, parts):
        if "[ARGS]" in part:
            name, _, body = part.partition("[ARGS]")
            calls.append(_call(len(calls), name.partition("[CALL_ID]")[0].strip(), body.strip()))
            continue
        try:
            listed = json.loads(part)
        except ValueError as error:
            calls.append(_call(len(calls), "", part, f"not valid JSON: {error}"))
            continue
        for one in listed if isinstance(listed, list) and listed else [listed]:
            calls.append(_named(json.dumps(one), len(calls), "arguments"))
    return Turn(before.strip(), reasoning, calls)


PARSERS: dict[str, Parse] = {
    "hermes": hermes,
    "llama3": llama3,
    "deepseek": deepseek,
    "harmony": harmony,
    "mistral": mistral,
}


def by_template(template: str) -> str:
    """The parser for a model whose chat template is this text."""
    marks = {
        "<|channel|>": "harmony",
        "<｜tool▁call": "deepseek",
        "[TOOL_CALLS]": "mistral",
        "<tool_call>": "hermes",
        "<|python_tag|>": "llama3",
        "<|eot_id|>": "llama3",
    }
    return next((name for mark, name in marks.items() if mark in template), "hermes")


def _thought(text: str) -> tuple[str, str]:
    """(what follows the reasoning, the reasoning). One that was begun and not ended is all there is."""
    found = THOUGHT.match(text)
    if found:
        return text[found.end() :], found[1].strip()
    if text.lstrip().startswith("<think>"):
        return "", text.lstrip().removeprefix("<think>").strip()
    return text, ""


def _named(body: str, number: int, *keys: str) -> Call:
    """A call written as one object with its name and, under one of `keys`, its arguments."""
    try:
        value = json.loads(body)
    except ValueError as error:
        named = re.search(r'"name"\s*:\s*"([^"]+)"', body)
        return _call(number, named[1] if named else "", body.strip(), f"not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _call(number, "", body.strip(), 'not an object with "name" and "arguments"')
    given: Any = next((value[key] for key in keys if key in value), {})
    return _call(number, value["name"], given if isinstance(given, str) else json.dumps(given))


def _call(number: int, name: str, raw: str, problem: str = "") -> Call:
    arguments = None
    if not problem:
        try:
            arguments = json.loads(raw or "{}")
        except ValueError as error:
            problem = f"the arguments are not valid JSON: {error}"
        if not problem and not isinstance(arguments, dict):
            problem = f"the arguments are no JSON object but {raw[:80]}"
    return Call(f"call_{number}", name, None if problem else arguments, raw, problem)


def _objects(text: str) -> list[str]:
    """JSON objects one after another, by `;` or nothing; what does not read is one piece."""
    decoder, at = json.JSONDecoder(), 0
    found: list[str] = []
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError:
            return [*found, text[at:]]
        found.append(text[at:end])
        at = end + len(re.match(r"[\s;,]*", text[end:])[0])  # type: ignore[index]
    return found
