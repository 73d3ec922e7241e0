"""A chat as tokens: the template renders what is new, and never again what was sampled.

    tokens so far    <user>2+2?<end><assistant>4                  sampled: 4, and mostly the end token
    closing          <end>\n                                      what the template puts behind an assistant's turn
    suffix           <user>and 3+3?<end><assistant>               what the new messages add to the render

The suffix is the render of the whole chat less the render of the chat so far. Where the latter is no beginning of the
former, the template rewrites its history (earlier reasoning dropped, calls rendered otherwise): the chat is rendered
anew, as a branch, or the episode fails clearly (`environment.on_rewrite`). Pure but for the template itself.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from async_rl.agents.llm import ChatMessage
from async_rl.errors import EngineFault

Tools = Sequence[dict[str, Any]]
Render = Callable[[Sequence[ChatMessage], Tools, bool], str]
"""messages, tools, whether the assistant's header follows -> text. May raise whatever a template raises."""
Encode = Callable[[str], list[int]]
SENTINEL = "assistant\u2063turn"  # a content that no template changes
UNSEEN = ("reasoning_content",)  # of a message, what agents do not send back


class Chat:
    """The states that an episode's chats were in after each reply."""

    def __init__(
        self, render: Render, encode: Encode, ends: Collection[int], on_rewrite: Literal["branch", "fail"] = "branch"
    ) -> None:
        self._render, self._encode, self._ends = render, encode, frozenset(ends)
        self._on_rewrite = on_rewrite
        self._states: list[tuple[list[ChatMessage], str, list[int]]] = []  # messages, tools, tokens
        self.rewritten = 0  # renders that did not go on from the tokens so far

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> list[int]:
        """The ids to sample behind. EngineFault where the template cannot render the chat."""
        state = self._state(messages, tools)
        if state is not None:
            history, _, tokens = state
            suffix = self._suffix(history, tokens, messages[len(history) :], tools)
            if suffix is not None:
                return tokens + suffix
            self.rewritten += 1
            if self._on_rewrite == "fail":
                raise EngineFault(
                    f"the chat template renders the first {len(history)} messages otherwise once others follow, so the "
                    "tokens that were sampled would not be those that are read; use environment.on_rewrite = 'branch'"
                )
        return self._encode(self._text(messages, tools, True))

    def replied(self, messages: Sequence[ChatMessage], tools: Tools, reply: ChatMessage, tokens: list[int]) -> None:
        """`reply` was sampled behind `messages`; tokens: prompt and completion."""
        self._states.append(([*messages, reply], _key(tools), tokens))

    def _state(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[list[ChatMessage], str, list[int]] | None:
        """The longest one that `messages` go on from."""
        key, seen = _key(tools), [_seen(message) for message in messages]
        fitting = [
            state
            for state in self._states
            if state[1] == key
            and len(state[0]) < len(messages)
            and [_seen(message) for message in state[0]] == seen[: len(state[0])]
        ]
        return max(reversed(fitting), key=lambda state: len(state[0]), default=None)

    def _suffix(
        self, history: list[ChatMessage], tokens: list[int], new: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """What stands between `tokens` and the next turn; None where the template rewrites."""
        try:
            before = self._text(history, tools, False)
            whole = self._text([*history, *new], tools, True)
            closed = self._text([*history[:-1], {"role": "assistant", "content": SENTINEL}], tools, False)
        except EngineFault:
            return None
        _, found, closing = closed.rpartition(SENTINEL)
        if not found or not whole.startswith(before):
            return None
        ids = self._encode(closing + whole[len(before) :])
        if tokens[-1] in self._ends and ids and ids[0] in self._ends:
            ids = ids[1:]  # the model ended its turn by itself
        return ids

    def _text(self, messages: Sequence[ChatMessage], tools: Tools, header: bool) -> str:
        try:
            return self._render([_for_template(message) for message in messages], tools, header)
        except Exception as error:  # a chat template is code that came with the model
            raise EngineFault(f"the chat template cannot render it: {type(error).__name__}: {error}") from None


def _key(tools: Tools) -> str:
    return json.dumps(list(tools), sort_keys=True)


def _seen(message: ChatMessage) -> ChatMessage:
    """What is compared of a message: an agent's library adds empty fields, and spaces in arguments."""
    kept = {k: v for k, v in message.items() if k not in UNSEEN and v not in (None, [], "")}
    calls = [(call.get("id"), call["function"]["name"], _arguments(call)) for call in kept.pop("tool_calls", ())]
    return kept | {"tool_calls": calls}


def _for_template(message: ChatMessage) -> ChatMessage:
    """Templates want the arguments of a call as an object, and a content."""
    if not message.get("tool_calls"):
        return {"content": "", **{k: v for k, v in message.items() if k != "tool_calls" and v is not None}}
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _arguments(call: dict[str, Any]) -> Any:
    given = call["function"].get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
