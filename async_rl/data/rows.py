"""A row of any source, and the Task it becomes."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from async_rl.config.schema import Data, HFDataset, JsonLines, Source
from async_rl.errors import UserError, nearest
from async_rl.trajectory import Message, Task


class Row(msgspec.Struct, frozen=True):
    """`prompt` or `messages`, never both."""

    prompt: str | None
    messages: list[Message] | None
    answer: str | None
    metadata: dict[str, Any]  # JSON values

    @property
    def question(self) -> str:
        """What makes two rows the same task."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{m.role}: {m.content}" for m in self.messages or [])


class OpenSource(Protocol):
    """Rows by position, read when asked for."""

    name: str

    def __len__(self) -> int: ...

    def row(self, position: int) -> Row:
        """Raises UserError naming the file and line, or the data set and entry."""
        ...


def task_of(row: Row, index: int, source: str, config: Source, data: Data) -> Task:
    """`row` as the model is to see it: suffix behind the question, template and system message around it."""
    messages, prompt = row.messages, None
    if messages is not None:
        last = messages[-1]
        messages = [*messages[:-1], Message(role=last.role, content=last.content + config.suffix)]
    elif row.prompt is not None:
        prompt = data.template.replace("{prompt}", row.prompt + config.suffix)
        if data.format == "chat":
            messages, prompt = [Message(role="user", content=prompt)], None
    if messages is not None and data.system and messages[0].role != "system":
        messages = [Message(role="system", content=data.system), *messages]
    return Task(index=index, source=source, messages=messages, prompt=prompt, answer=row.answer, metadata=row.metadata)


def row_of(record: dict[str, Any], config: JsonLines | HFDataset, where: str) -> Row:
    """The row in `record` by the keys that `config` names; UserError that begins with `where`."""
    rest = dict(record)
    messages, prompt = rest.pop(config.messages_key, None), rest.pop(config.prompt_key, None)
    if messages is None and prompt is None:
        raise UserError(
            f"{where}: neither '{config.prompt_key}' (prompt_key) nor '{config.messages_key}' (messages_key)"
            f"{keys(record)}"
        )
    if prompt is not None and not isinstance(prompt, str):
        raise UserError(f"{where}: '{config.prompt_key}' is {type(prompt).__name__}, not text")
    if config.answer_key not in record and config.answer_key != "answer":
        raise UserError(f"{where}: no '{config.answer_key}' (answer_key){keys(record)}")
    answer = rest.pop(config.answer_key, None)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise UserError(f"{where}: '{config.answer_key}' is {type(answer).__name__}, not text or a number")
    try:
        metadata = msgspec.to_builtins(rest, str_keys=True)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: a value that JSON cannot carry: {error}") from None
    return Row(
        prompt=prompt if messages is None else None,
        messages=None if messages is None else _conversation(messages, f"{where}: '{config.messages_key}'"),
        answer=None if answer is None else str(answer),
        metadata=metadata,
    )


def _conversation(value: Any, where: str) -> list[Message]:
    if isinstance(value, list):  # columns of other roles are null in Hugging Face rows
        value = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value]
    try:
        messages = msgspec.convert(value, list[Message])
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None
    if not messages or messages[-1].role != "user":
        raise UserError(f"{where} must end with a message of the user, for the model to answer")
    return messages


def keys(record: Iterable[str]) -> str:
    return f"; it has: {', '.join(sorted(record))}"


def existing(path: str, setting: str) -> Path:
    """`path`, or a UserError with the nearest name beside it."""
    found = Path(path)
    if not found.exists():
        beside = [str(p) for p in found.parent.iterdir()] if found.parent.is_dir() else []
        beside = [p for p in beside if not Path(p).name.startswith(".")]
        close = difflib.get_close_matches(path, beside, n=1) or sorted(beside)[:8]
        raise UserError(f"{setting} = '{path}': no such file{nearest(path, close)}")
    return found
