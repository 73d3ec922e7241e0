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
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from async_rl.agents.llm import EpisodeOver
from async_rl.errors import EngineDied, EngineFault
from async_rl.services.rollout.dialects import Answer, Handler, Refused, anthropic, openai
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


# --- HTTP --------------------------------------------------------------------------------------------


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
