"""A task's prompt as tokens, a completion as text."""

from typing import Any

from async_rl.trajectory import Task


class TokenizerText:
    """By the model's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, task: Task) -> list[int]:
        """Messages through the chat template, the answer's header added; a plain prompt as it is."""
        if task.messages is None:
            return list(self._tokenizer(task.prompt or "").input_ids)
        messages = [{"role": m.role, "content": m.content} for m in task.messages]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
