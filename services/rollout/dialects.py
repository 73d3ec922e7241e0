"""Requests in the forms of OpenAI and Anthropic as turns of the policy, and its turns in theirs.

Each gives the reply, and the same as the events of a stream.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from async_rl.agents.llm import Reply
from async_rl.errors import AsyncRLError
from async_rl.services.rollout.episodes import Policy

Answer = tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]
"""The reply, and the same as the events of a stream."""
Handler = Callable[[Policy, dict[str, Any]], Coroutine[Any, Any, Answer]]


class Refused(AsyncRLError):
    """A request that cannot be carried out as it is."""


# --- OpenAI ------------------------------------------------------------------------------------------


async def openai(policy: Policy, body: dict[str, Any]) -> Answer:
    """POST /v1/chat/completions."""
    if body.get("n") not in (None, 1):
        raise Refused("n: ask once for each choice")
    with _form():
        messages = [_plain(message) for message in _list(body, "messages")]
        tools = [{"type": "function", "function": dict(tool["function"])} for tool in body.get("tools") or ()]
        limit = _limit(body.get("max_completion_tokens") or body.get("max_tokens"))
    reply = await policy.chat(messages, tools=tools, max_new_tokens=limit)
    finish = "length" if reply.stop != "eos" else "tool_calls" if reply.calls else "stop"
    logprobs = _logprobs(reply) if body.get("logprobs") else None
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": body.get("model", "policy")}
    usage = _usage(reply, "prompt_tokens", "completion_tokens") | {
        "total_tokens": reply.prompt_tokens + len(reply.tokens)
    }
    choice = {"index": 0, "message": reply.message, "finish_reason": finish, "logprobs": logprobs}
    whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    delta = dict(reply.message)
    if reply.calls:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
    chunk = {**head, "object": "chat.completion.chunk"}
    events: list[tuple[str, dict[str, Any]]] = [
        ("", {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}),
        ("", {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": usage}),
    ]
    return whole, events


def _logprobs(reply: Reply) -> dict[str, Any]:
    pairs = zip(reply.tokens, reply.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """With its content as text; parts other than text are refused."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {**message, "role": role, "content": content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": str(call["id"]), "type": "function", "function": dict(call["function"])}
            for call in message["tool_calls"]
        ]
        _ = [call["function"]["name"] for call in plain["tool_calls"]]
    return plain


@contextlib.contextmanager
def _form() -> Iterator[None]:
    """What is not of the API's form is refused, not a defect of ours."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(f"the request is not of the API's form: {type(error).__name__}: {error}") from None


def _limit(value: Any) -> int | None:
    if value is None:
        return None
    if int(value) < 1:
        raise ValueError(f"a limit of {value} tokens")
    return int(value)


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise Refused(f"messages: a part of type {kind!r}; this policy reads text")
    return str(part["text"])


# --- Anthropic ---------------------------------------------------------------------------------------


async def anthropic(policy: Policy, body: dict[str, Any]) -> Answer:
    """POST /v1/messages."""
    with _form():
        messages, tools, limit = from_anthropic(body), _anthropic_tools(body), _limit(body.get("max_tokens"))
    reply = await policy.chat(messages, tools=tools, max_new_tokens=limit)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": reply.content}] if reply.content else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments or {}} for call in reply.calls
    ]
    stop = "max_tokens" if reply.stop != "eos" else "tool_use" if reply.calls else "end_turn"
    head = {
        "id": f"msg_{secrets.token_hex(8)}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "policy"),
    }
    usage = _usage(reply, "input_tokens", "output_tokens")
    whole = {**head, "content": blocks, "stop_reason": stop, "stop_sequence": None, "usage": usage}
    begin = {**whole, "content": [], "stop_reason": None}
    events: list[tuple[str, dict[str, Any]]] = [("message_start", {"type": "message_start", "message": begin})]
    for n, block in enumerate(blocks):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        for kind, rest in (
            ("content_block_start", {"content_block": empty}),
            ("content_block_delta", {"delta": delta}),
            ("content_block_stop", {}),
        ):
            events.append((kind, {"type": kind, "index": n, **rest}))
    ending = {"stop_reason": stop, "stop_sequence": None}
    events.append(("message_delta", {"type": "message_delta", "delta": ending, "usage": usage}))
    events.append(("message_stop", {"type": "message_stop"}))
    return whole, events


def _anthropic_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in body.get("tools") or ()
    ]


def from_anthropic(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request in OpenAI's form."""
    system = body.get("system")
    if isinstance(system, list):
        system = "".join(_text(part) for part in system)
    made: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in _list(body, "messages"):
        content = message.get("content")
        if isinstance(content, str):
            made.append({"role": message.get("role"), "content": content})
            continue
        text = "".join(_text(part) for part in content if part.get("type") not in ("tool_use", "tool_result"))
        used = [part for part in content if part.get("type") == "tool_use"]
        for part in content:
            if part.get("type") == "tool_result":
                given = part.get("content") or ""
                answer = given if isinstance(given, str) else "".join(_text(piece) for piece in given)
                made.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": answer})
        if used:
            calls = [
                {
                    "id": part["id"],
                    "type": "function",
                    "function": {"name": part["name"], "arguments": json.dumps(part["input"])},
                }
                for part in used
            ]
            made.append({"role": "assistant", "content": text, "tool_calls": calls})
        elif text:
            made.append({"role": message.get("role"), "content": text})
    return made


def _usage(reply: Reply, prompt: str, completion: str) -> dict[str, int]:
    return {prompt: reply.prompt_tokens, completion: len(reply.tokens)}


def _list(body: dict[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise Refused(f"{key}: a list of messages is wanted")
    return found
