"""`async-rl buffer RUN`: what is in the buffer of a run, by its journal; of a live run as well as of a dead one."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from async_rl.buffers.history import History, history, members
from async_rl.buffers.inspect import files, follow, overview
from async_rl.buffers.journal.archive import Archive
from async_rl.cli.named import named_run
from async_rl.config import load
from async_rl.errors import UserError, nearest
from async_rl.models.load import load_tokenizer
from async_rl.rundir import RunDir
from async_rl.trajectory import Trajectory, token_versions

Decode = Callable[[list[int]], str]


def buffer(name: str, *, group: int | None, member: int | None) -> int:
    """Print it. Nothing is changed, nobody asked."""
    if member is not None and group is None:
        raise UserError(f"--member {member} needs --group")
    run, file = named_run(name)
    archive = Archive(run.journal)
    try:
        for line in _lines(run, file, archive, group, member):
            print(line)
    finally:
        archive.close()
    return 0


def _lines(run: RunDir, file: Path | None, archive: Archive, group: int | None, member: int | None) -> Iterator[str]:
    if group is None:
        yield from files(run.journal)
        seen, live = follow(archive), run.running("buffer")
        yield from overview(seen, time.time() if live else seen.latest)
        if not live:
            yield "the buffer is not running: ages are of when it wrote last"
        return
    found = history(archive, group)
    if member is None:
        yield f"group {group}{_task(found)}"
        yield from found.lines
        yield from members(archive, found)
        return
    if member not in found.members:
        raise UserError(f"group {group} has no member {member}{nearest(str(member), map(str, found.members))}")
    known = found.members[member]
    yield f"group {group}, member {member}{_task(found)}"
    if known.score is not None:
        parts = "".join(f", {key} {value:g}" for key, value in known.score.components.items())
        detail = f": {known.score.detail}" if known.score.detail else ""
        yield f"score: {known.score.reward} ({known.score.status}){parts}{detail}"
    yield from shown(archive.get(known.place), _decoder(file))


def shown(trajectory: Trajectory, decode: Decode | None) -> Iterator[str]:
    """A trajectory as text: prompt, completion, and a line a token."""
    sampled = np.flatnonzero(trajectory.action)
    prompt = trajectory.tokens[: sampled[0]].tolist()
    yield f"prompt: {prompt if decode is None else repr(decode(prompt))}"
    yield f"completion: {trajectory.text!r}, ended by {trajectory.stop}"
    if trajectory.reward is not None:
        yield f"reward of the episode: {trajectory.reward:g}"
    for tool in trajectory.tools:
        yield f"tool {tool.name}: {tool.status}, {tool.wall_s:.3f} s"
    versions = iter(token_versions(trajectory).tolist())
    for number, sequence in enumerate(trajectory.sequences):
        if number:
            yield f"branch {number}"
        yield "place      id  action  version  log-probability  text"
        for place, token in enumerate(sequence.tokens.tolist()):
            text = "" if decode is None else repr(decode([token]))
            if sequence.action[place]:
                figures = f"{'yes':6}  {next(versions):7}  {sequence.logprobs[place]:15.4f}"
            else:
                figures = f"{'no':6}  {'-':>7}  {'-':>15}"
            yield f"{place:5}  {token:6}  {figures}  {text}".rstrip()


def _task(found: History) -> str:
    if found.drawn is None:
        return ""
    task = found.drawn.task
    return f": task {task.index} of {task.source}, {task.text!r}, answer {task.answer!r}"


def _decoder(file: Path | None) -> Decode | None:
    """By the tokenizer of the run; None where it is not there (a run of the fake engine has none)."""
    if file is None:
        return None
    try:
        tokenizer = load_tokenizer(load(file).model)
    except UserError:
        return None
    return lambda ids: str(tokenizer.decode(ids))
