"""Prompts and chats as tokens, completions as text, by the model's own tokenizer and chat template."""

from collections.abc import Sequence
from typing import Any, Protocol

from async_rl.agents.parsers import by_template
from async_rl.trajectory import Task


class Text(Protocol):
    """Prompts to tokens, completions to text."""

    def encode(self, task: Task) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ChatText(Text, Protocol):
    """And what episodes need beside it."""

    ends: frozenset[int]  # ids that end a completion
    parser: str  # of tool calls, the one that the model's template is written for

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], header: bool) -> str: ...

    def encode_text(self, text: str) -> list[int]:
        """Special tokens in the text are what they stand for; none is added."""

    def decode_all(self, tokens: list[int]) -> str:
        """With special tokens."""


class TokenizerText:
    """A ChatText."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.ends = frozenset(ends)
        self.parser = by_template(str(tokenizer.chat_template or ""))

    def encode(self, task: Task) -> list[int]:
        """Messages through the chat template, the answer's header added; a plain prompt as it is."""
        if task.messages is None:
            return list(self._tokenizer(task.prompt or "").input_ids)
        return self.encode_text(self.render(task.chat(), (), True))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], header: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=header, tokenize=False
            )
        )

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode_all(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
