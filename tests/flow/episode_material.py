"""A scripted policy behind a real tokenizer, for tests of episodes."""

import asyncio
import contextlib

from async_rl.agents.parsers import PARSERS
from async_rl.agents.processes import Processes
from async_rl.config.schema import Environment, EpisodeFunction
from async_rl.services.rollout.engine import Completion
from async_rl.services.rollout.episodes import Episodes
from async_rl.trajectory import Task
from tests.unit.chat_material import chat_text

TASK = Task(index=3, source="test", prompt="2+2?", answer="4")
CONTEXT = 4096


class Script:
    """Says its lines one after another; each ends with the end token, but those that begin with "..." are cut."""

    def __init__(self, *lines, family="qwen", delay_s=0.0, version=0):
        self.text, self.lines = chat_text(family), list(lines)
        self.delay_s, self.version = delay_s, version
        self.prompts, self.sampled, self.limits = [], [], []

    async def __call__(self, prompt, limit, call, draft):
        draft.mark(self.version)
        await asyncio.sleep(self.delay_s)
        line = self.lines[min(call, len(self.lines) - 1)]
        if isinstance(line, Exception):
            raise line
        cut = line.startswith("...")
        tokens = self.text.encode_text(line.removeprefix("...")) + ([] if cut else [min(self.text.ends)])
        tokens = tokens[:limit]
        self.prompts.append(prompt)
        self.sampled.append(tokens)
        self.limits.append(limit)
        draft.tokens.extend(tokens)
        draft.logprobs.extend([-0.5] * len(tokens))
        ended = tokens[-1] in self.text.ends
        return Completion(tokens, [-0.5] * len(tokens), [(self.version, len(tokens))], "eos" if ended else "length")


def settings(**given):
    return Environment(**{"run": EpisodeFunction(function="none:none")} | given)


@contextlib.asynccontextmanager
async def episodes(episode, script, **given):
    processes = Processes(2)
    try:
        parse = PARSERS[script.text.parser]
        yield Episodes(episode, settings(**given), script.text, parse, CONTEXT, processes)
    finally:
        await processes.close()


def run(episode, script, task=TASK, **given):
    """The trajectory of one episode."""

    async def work():
        async with asyncio.timeout(60), episodes(episode, script, **given) as made:
            return await made.run(task, script, [])

    return asyncio.run(work())


def call_of(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
