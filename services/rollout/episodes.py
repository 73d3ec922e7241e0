"""Episodes: many calls of the engine, one trajectory.

Policy      what an episode sees (agents.llm.LLM): counts, caps, and writes down what goes through the engine
Episodes    runs the configured environment, anew where it raised
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from async_rl.agents.chat import Chat
from async_rl.agents.llm import Call, ChatMessage, EpisodeOver, Reply, message_of, numbered
from async_rl.agents.parsers import Parse
from async_rl.agents.processes import Processes
from async_rl.agents.recording import Recording
from async_rl.agents.tools import Tool, carry_out
from async_rl.config.schema import Environment
from async_rl.errors import EngineDied, EngineFault
from async_rl.models.text import ChatText
from async_rl.services.rollout.engine import Completion, Draft
from async_rl.trajectory import StopReason, Task, Trajectory

Sample = Callable[[list[int], int | None, int, Draft], Awaitable[Completion]]
"""prompt, cap on new tokens (None: the run's), number of the call in its episode, draft -> completion."""

log = logging.getLogger(__name__)


class Policy:
    """The LLM of one episode. drafts: where each call's draft is put while it is made, for all who look."""

    def __init__(
        self,
        sample: Sample,
        text: ChatText,
        parse: Parse,
        settings: Environment,
        context: int,
        processes: Processes,
        drafts: list[Draft],
    ) -> None:
        self._sample, self._text, self._parse = sample, text, parse
        self._settings, self._context, self._processes, self._drafts = settings, context, processes, drafts
        self._chat = Chat(text.render, text.encode_text, text.ends, settings.on_rewrite)
        self._calls = 0
        self._invalid = 0  # turns in a row
        self._over: StopReason | None = None
        self._last: StopReason = "eos"
        self.recording = Recording()
        self.answer = ""  # the last turn's text

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] = (),
        max_new_tokens: int | None = None,
    ) -> Reply:
        specs = [tool.spec if isinstance(tool, Tool) else tool for tool in tools]
        prompt = self._chat.prompt(messages, specs)
        reply = await self._turn(prompt, max_new_tokens)
        self._chat.replied(messages, specs, reply.message, prompt + reply.tokens)
        malformed = any(call.problem for call in reply.calls) or not (reply.content or reply.calls)
        self._invalid = self._invalid + 1 if malformed else 0
        return reply

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Reply:
        return await self._turn(list(tokens), max_new_tokens)

    async def run(self, calls: Sequence[Call], tools: Sequence[Tool]) -> list[ChatMessage]:
        by_name = {tool.name: tool for tool in tools}
        done = await asyncio.gather(*(carry_out(call, by_name, self._settings.tool_timeout_s) for call in calls))
        self.recording.tools += [use for _, use in done]
        return [message for message, _ in done]

    def tool(self, function: Callable[..., Any]) -> Tool:
        return Tool.of(function, self._processes)

    def encode(self, text: str) -> list[int]:
        return self._text.encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(list(tokens))

    @property
    def is_over(self) -> bool:
        """Whether a cap has ended it."""
        return self._over is not None

    def over(self, stop: StopReason, reason: str) -> EpisodeOver:
        """There is no further turn."""
        self._over = self._over or stop
        return EpisodeOver(stop, reason)

    def trajectory(self, reward: float | None) -> Trajectory:
        return self.recording.trajectory(self._over or self._last, self.answer, reward)

    async def _turn(self, prompt: list[int], limit: int | None) -> Reply:
        self._judge(len(prompt))
        number = self._calls
        self._calls += 1
        left = None if self._settings.max_tokens is None else self._settings.max_tokens - self.recording.sampled
        limits = [cap for cap in (limit, left) if cap is not None]
        draft = Draft()
        self._drafts.append(draft)
        made = await self._sample(prompt, min(limits) if limits else None, number, draft)
        self.recording.add(prompt, made.tokens, made.logprobs, made.versions, made.survivors, made.routing)
        self._last = made.stop
        ended = made.tokens[-1] in self._text.ends
        turn = self._parse(self._text.decode_all(made.tokens[:-1] if ended else made.tokens))
        self.answer = turn.content
        calls = numbered(turn.calls, number)
        return Reply(
            turn.content,
            turn.reasoning,
            calls,
            made.tokens,
            made.logprobs,
            made.stop,
            len(prompt),
            message_of(turn.content, turn.reasoning, calls),
        )

    def _judge(self, prompt: int) -> None:
        """Raise EpisodeOver where a cap allows no further turn."""
        settings = self._settings
        if self._over is not None:
            raise self.over(self._over, f"the episode is over: {self._over}")
        if self._calls >= settings.max_turns:
            raise self.over("turns", f"environment.max_turns = {settings.max_turns} is reached")
        if settings.max_tokens is not None and self.recording.sampled >= settings.max_tokens:
            raise self.over("tokens", f"environment.max_tokens = {settings.max_tokens} is reached")
        if self._invalid >= settings.max_invalid_turns:
            raise self.over("invalid", f"environment.max_invalid_turns = {settings.max_invalid_turns} in a row")
        if prompt >= self._context:
            raise self.over("context", f"a prompt of {prompt} tokens leaves no room in a context of {self._context}")


Episode = Callable[[Task, Policy], Awaitable[Any]]


class Episodes:
    """The configured environment. processes: those that plain tools run in."""

    def __init__(
        self, episode: Episode, settings: Environment, text: ChatText, parse: Parse, context: int, processes: Processes
    ) -> None:
        self._episode, self._settings = episode, settings
        self._text, self._parse, self._context = text, parse, context
        self._processes = processes

    async def run(self, task: Task, sample: Sample, drafts: list[Draft]) -> Trajectory:
        """One episode of `task`. An environment that raises is begun anew, `environment.retries` times; what it raises
        then is raised. EngineFault where an episode sampled nothing."""
        for left in range(self._settings.retries, -1, -1):
            drafts.clear()
            policy = Policy(sample, self._text, self._parse, self._settings, self._context, self._processes, drafts)
            try:
                return await self._once(task, policy)
            except (EngineDied, asyncio.CancelledError):
                raise
            except Exception as error:
                if not left:
                    raise
                log.warning("task %d: the episode raised %s: %s; once more", task.index, type(error).__name__, error)
        raise AssertionError("unreachable")

    async def _once(self, task: Task, policy: Policy) -> Trajectory:
        began, reward = time.monotonic(), None
        try:
            async with asyncio.timeout(self._settings.timeout_s) as deadline:
                reward = await self._episode(task, policy)
        except EpisodeOver:
            pass
        except TimeoutError:
            if not deadline.expired():
                raise
            log.info("task %d: the episode is over its time after %.1f s", task.index, time.monotonic() - began)
            policy.over("deadline", f"environment.timeout_s = {self._settings.timeout_s:g} is over")
        if not policy.recording.sampled:
            raise EngineFault("the episode sampled nothing")
        return policy.trajectory(None if reward is None else float(reward))
