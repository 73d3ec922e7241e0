"""Demonstrations of episodes for the warm-up, as tokens by the same templates and parsers as the rollouts' own.

`warmup.demonstrate` names a function of yours:

    def demonstrate(task, random) -> list[str | list[str]]:
        return ['<tool_call>{"name": "add", ...}</tool_call>', ["4"], "It is 4."]

what the model says, and, as a list, what its tools answered. Its mistakes are the noise.
"""

import hashlib
import inspect
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.agents.chat import Chat
from async_rl.agents.llm import message_of, numbered
from async_rl.agents.parsers import PARSERS, by_template
from async_rl.config.schema import Config
from async_rl.errors import ConfigError
from async_rl.models.text import TokenizerText
from async_rl.trajectory import Task
from async_rl.user_code import load

if TYPE_CHECKING:
    from async_rl.models.warmup import Example

KEY = "warmup.demonstrate"


def played(config: Config, tokenizer: Any, tasks: list[Task]) -> "list[Example]":
    """One episode of each task; ConfigError where one does not fit the model."""
    assert config.warmup is not None and config.warmup.demonstrate is not None
    function = load(KEY, config.warmup.demonstrate, "demonstrate(task, random)")
    examples = []
    for task in tasks:
        try:
            turns = function(task, random.Random(f"{config.seed} {task.index}"))
        except Exception as error:  # the user's own
            where = f"{KEY} = '{config.warmup.demonstrate}': task {task.index} of '{task.source}'"
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from None
        examples.append(_example(config, tokenizer, task, turns))
    return examples


def own_source(config: Config) -> str:
    """A digest of the file that the function stands in: a change of it makes another model."""
    if config.warmup is None or config.warmup.demonstrate is None:
        return ""
    function = load(KEY, config.warmup.demonstrate, "demonstrate(task, random)")
    file = inspect.getsourcefile(sys.modules[function.__module__])
    return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()


def _example(config: Config, tokenizer: Any, task: Task, turns: list[str | list[str]]) -> "Example":
    from async_rl.models.warmup import Example

    assert config.warmup is not None
    end = tokenizer.eos_token_id
    text = TokenizerText(tokenizer, [end])
    chat, parse = Chat(text.render, text.encode_text, text.ends), PARSERS[by_template(config.warmup.template)]
    messages, first, ids, learned = task.chat(), 0, list[int](), list[bool]()
    for number, turn in enumerate(turns):
        if isinstance(turn, list):
            calls = messages[-1].get("tool_calls", [])
            answers = zip(calls, turn, strict=True)
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": answer} for c, answer in answers]
            continue
        prompt = chat.prompt(messages, ())
        first = first or len(prompt)
        said = [*text.encode_text(turn), end]
        learned += [False] * (len(prompt) - len(ids)) + [True] * len(said)
        ids = prompt + said
        parsed = parse(turn)
        messages.append(message_of(parsed.content, parsed.reasoning, numbered(parsed.calls, number)))
        chat.replied(messages[:-1], (), messages[-1], ids)
    if tokenizer.unk_token_id in ids:
        shown = tokenizer.decode(ids)
        raise ConfigError(f"warmup.characters: a demonstration has one that is not among them: {shown!r}")
    if len(ids) > config.warmup.context:
        raise ConfigError(f"warmup.context = {config.warmup.context}: a demonstration is {len(ids)} tokens")
    return Example(ids[:first], ids[first:-1], learned[first:])
