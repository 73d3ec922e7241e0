"""What an episode sees of the model: a chat that it goes on with, or tokens that it continues.

    async def episode(task: Task, llm: LLM) -> float | None:
        messages = task.chat()
        while True:
            reply = await llm.chat(messages, tools=TOOLS)
            messages.append(reply.message)
            if not reply.calls:
                return float(task.answer in reply.content)
            messages += await llm.run(reply.calls, TOOLS)

Every call is written down as it was sampled: token ids, log-probabilities, versions. Calls may run beside each other,
and a call may go back to an earlier point of the chat: that begins a branch. A sub-agent is a chat of its own, with
other messages. None leaves the reward to `reward.grader`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from async_rl.trajectory import StopReason

if TYPE_CHECKING:
    from async_rl.agents.tools import Tool

ChatMessage = dict[str, Any]
"""In the form of OpenAI's chat completions: role, content, tool_calls, tool_call_id, reasoning_content."""


class Call(msgspec.Struct, frozen=True):
    """A tool call as the model wrote it. Where it is malformed, `arguments` is None and `problem` says why."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str  # the arguments as text
    problem: str = ""


class Reply(msgspec.Struct, frozen=True):
    """One turn of the model."""

    content: str  # without reasoning and tool calls
    reasoning: str
    calls: list[Call]
    tokens: list[int]  # as sampled
    logprobs: list[float]  # of each
    stop: StopReason
    prompt_tokens: int
    message: ChatMessage  # to be appended to the chat, as it is


def numbered(calls: Sequence[Call], turn: int) -> list[Call]:
    """With ids of nine characters, which some templates insist on, each once in its episode."""
    return [
        Call(f"c{turn:04d}{n:04d}", call.name, call.arguments, call.raw, call.problem) for n, call in enumerate(calls)
    ]


def message_of(content: str, reasoning: str, calls: Sequence[Call]) -> ChatMessage:
    """A turn in the form of OpenAI's chat completions."""
    message: ChatMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
            for call in calls
        ]
    return message


class EpisodeOver(Exception):
    """A cap is reached (turns, tokens, context, time): there is no further turn. An episode may let it pass; one that
    catches it may still give its reward."""

    def __init__(self, stop: StopReason, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


class LLM(Protocol):
    """The policy, in one episode."""

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] = (),
        max_new_tokens: int | None = None,
    ) -> Reply:
        """The model's next turn. `tools`: Tools, or JSON schemas in OpenAI's form. Raises EpisodeOver where a cap is
        reached."""

    async def run(self, calls: Sequence[Call], tools: "Sequence[Tool]") -> list[ChatMessage]:
        """The answers of the tools, beside each other, each under environment.tool_timeout_s; to be appended to the
        chat. What is malformed, or fails, is answered so."""

    def tool(self, function: Callable[..., Any]) -> "Tool":
        """A function with type hints as a tool, run as the environment says."""

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Reply:
        """What the model samples behind these ids, without any template."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens."""

    def decode(self, tokens: Sequence[int]) -> str: ...
