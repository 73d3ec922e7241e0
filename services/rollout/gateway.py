"""An endpoint that speaks OpenAI's chat completions and Anthropic's messages, so that an agent written for them is
trained unchanged. One base URL for each episode; the trajectory is what really went through.

    {base}/v1/chat/completions    OpenAI        (base_url = {base}/v1)
    {base}/v1/messages            Anthropic     (base_url = {base})
    {base}/reward                 POST {"reward": 0.5}: the episode's reward
    {base}/task                   the task as JSON

Sampling is the run's: a temperature that an agent asks for would make other log-probabilities than those that are
trained, and is left aside. What cannot be left aside (guided decoding, penalties, stop strings) is refused by name.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from async_rl.agents.llm import EpisodeOver, Reply
from async_rl.errors import AsyncRLError, EngineDied, EngineFault
from async_rl.services.rollout.episodes import Policy
from async_rl.trajectory import Task

BODY_BYTES = 2**26
REFUSED = {
    "stop": "stop strings",
    "stop_sequences": "stop strings",
    "logit_bias": "a logit bias",
    "guided_json": "guided decoding",
    "response_format": "guided decoding",
    "frequency_penalty": "penalties",
    "presence_penalty": "penalties",
}
log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]
"""The reply, and the same as the events of a stream."""
Handler = Callable[[Policy, dict[str, Any]], Coroutine[Any, Any, Answer]]


class Refused(AsyncRLError):
    """A request that cannot be carried out as it is."""


class Session:
    """One episode that somebody outside drives."""

    def __init__(self, task: Task, policy: Policy, address: str) -> None:
        self.task, self.policy = task, policy
        self.base_url = address
        self.reward: float | None = None
        self.died: EngineDied | None = None  # the engine, while it answered a request
        self.answering: set[asyncio.Task[Any]] = set()


class Gateway:
    """Listens on a free loopback port while it is open."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._address = ""
        self._told: set[str] = set()

    async def __aenter__(self) -> "Gateway":
        application = web.Application(client_max_size=BODY_BYTES)
        application.add_routes(
            [
                web.post("/{id}/v1/chat/completions", self._handle(openai)),
                web.post("/{id}/v1/messages", self._handle(anthropic)),
                web.get("/{id}/v1/models", self._models),
                web.post("/{id}/reward", self._reward),
                web.get("/{id}/task", self._task),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def open(self, task: Task, policy: Policy) -> Session:
        """An episode under an address that nobody can guess; close it in the end."""
        key = secrets.token_urlsafe(16)
        session = self._sessions[key] = Session(task, policy, f"{self._address}/{key}")
        return session

    def close(self, session: Session) -> None:
        self._sessions.pop(session.base_url.rpartition("/")[2], None)
        for task in session.answering:  # of an episode that is over nobody waits for an answer
            task.cancel()

    # --- routes --------------------------------------------------------------------------------------

    def _handle(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session, body = self._session(request), await _json(request)
                self._judge(body)
                reply, events = await self._answer(session, handler, body)
            except EngineDied as error:
                return _error(503, str(error), "engine_died")
            except EpisodeOver as error:
                code = "context_length_exceeded" if error.stop == "context" else "episode_over"
                return _error(400, str(error), code)
            except Refused as error:
                return _error(400, str(error), "refused")
            except EngineFault as error:
                return _error(422, str(error), "engine_fault")
            if body.get("stream"):
                return await _stream(request, events)
            return web.json_response(reply)

        return handle

    async def _answer(self, session: Session, handler: Handler, body: dict[str, Any]) -> Answer:
        task = asyncio.ensure_future(handler(session.policy, body))
        session.answering.add(task)
        try:
            return await task
        except EngineDied as error:
            session.died = error
            raise
        finally:
            session.answering.discard(task)
            task.cancel()

    def _judge(self, body: dict[str, Any]) -> None:
        for key, what in REFUSED.items():
            if body.get(key) not in (None, 0, 0.0, [], {}, {"type": "text"}):
                raise Refused(f"{key}: {what} would sample another distribution than the one that is trained")
        for key in ("temperature", "top_p", "top_k"):
            if body.get(key) is not None and key not in self._told:
                self._told.add(key)
                log.info("gateway: %s = %s is left aside: sampling.%s of the run holds", key, body[key], key)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            raise Refused("no such episode, or one that is over")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "async-rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        try:
            session, body = self._session(request), await _json(request)
            session.reward = float(msgspec.convert(body.get("reward"), float, strict=False))
        except (Refused, msgspec.ValidationError) as error:
            return _error(400, f'{error}; post {{"reward": a number}}', "refused")
        return web.json_response({"reward": session.reward})

    async def _task(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(msgspec.to_builtins(self._session(request).task))
        except Refused as error:
            return _error(404, str(error), "refused")


# --- OpenAI ------------------------------------------------------------------------------------------


async def openai(policy: Policy, body: dict[str, Any]) -> Answer:
    """POST /v1/chat/completions."""
    if body.get("n") not in (None, 1):
        raise Refused("n: ask once for each choice")
    messages = [_plain(message) for message in _list(body, "messages")]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    reply = await policy.chat(messages, tools=body.get("tools") or (), max_new_tokens=limit)
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
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": content}


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise Refused(f"messages: a part of type {kind!r}; this policy reads text")
    return str(part["text"])


# --- Anthropic ---------------------------------------------------------------------------------------


async def anthropic(policy: Policy, body: dict[str, Any]) -> Answer:
    """POST /v1/messages."""
    messages = from_anthropic(body)
    tools = [
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
    reply = await policy.chat(messages, tools=tools, max_new_tokens=body.get("max_tokens"))
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


# --- HTTP --------------------------------------------------------------------------------------------


def _usage(reply: Reply, prompt: str, completion: str) -> dict[str, int]:
    return {prompt: reply.prompt_tokens, completion: len(reply.tokens)}


def _list(body: dict[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise Refused(f"{key}: a list of messages is wanted")
    return found


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    return body


def _error(status: int, message: str, code: str) -> web.Response:
    told = {"error": {"message": message, "type": "invalid_request_error", "code": code}, "type": "error"}
    return web.json_response(told, status=status)


async def _stream(request: web.Request, events: list[tuple[str, dict[str, Any]]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for kind, event in events:
        head = f"event: {kind}\n" if kind else ""
        await response.write(f"{head}data: {json.dumps(event)}\n\n".encode())
    if not events[0][0]:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
