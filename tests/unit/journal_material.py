"""A short run written to a journal, for its tests."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from async_rl.buffers import events
from async_rl.buffers.group import Place
from async_rl.buffers.journal import record
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.journal.record import Kind
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import State
from async_rl.config import schema
from async_rl.trajectory import Trajectory
from tests.unit.buffer_material import generate, grade, plain, rollout, settings, train

RULES = settings(groups=2, group_size=2, eta=2, held_out=2, max_steps=100, on_exceed="drop")


def limits(**changes: Any) -> schema.Journal:
    return schema.Journal(**changes)


class Played(Struct):
    """states: after each batch, as plain values; the first one is that before all of them."""

    states: list[Any]
    happened: list[events.Any]
    trajectories: dict[Place, Trajectory]  # all that was put
    segments: list[int] = []  # that were there at the end

    @property
    def last(self) -> Any:
        return self.states[-1]


def commands(machine: Machine, steps: int, first: int = 0) -> Iterator[None]:
    """Steps, an evaluation, a lapse, groups under way; yields where the buffer would answer."""
    if not first:
        machine.trainer.evaluate(0)
    for step in range(first, first + steps):
        for lease in rollout(machine, 8, at=step):
            generate(machine, lease, at=step)
            yield
        grade(machine)
        yield
        train(machine, step)
        yield
    now = 10_000.0 * (first + steps)
    rollout(machine, 4, at=first + steps, worker="rollout-1", now=now)
    yield
    machine.workers.lapse(now + 9000.0)
    yield
    for lease in rollout(machine, 2, at=first + steps, now=now + 9001.0):
        generate(machine, lease, at=first + steps, members=1)
    yield


class Noting(DiskJournal):
    """Remembers what it was given."""

    noted: dict[Place, Trajectory]

    def put(self, group: int, member: int, trajectory: Trajectory) -> Place:
        place = super().put(group, member, trajectory)
        self.__dict__.setdefault("noted", {})[place] = trajectory
        return place


def write(folder: Path, *, steps: int = 2, checkpoints: bool = False, **changes: Any) -> Played:
    """One batch for each answer; goes on from what the folder holds."""

    async def all_of_it() -> Played:
        journal, state = Noting.open(folder, RULES, limits(**changes))
        assert isinstance(journal, Noting)
        journal.noted = {}
        machine = Machine(RULES, state, store=journal)
        played = Played([plain(state)], [], journal.noted)
        for _ in commands(machine, steps, first=state.version):
            if checkpoints and state.version > max(2, min(state.draws, default=0) + 1):
                machine.trainer.checkpointed(state.version - 1, 0)
            happened = machine.take()
            await journal.append(happened)
            played.happened += happened
            played.states.append(plain(state))
        await journal.close()
        return played

    played = asyncio.run(all_of_it())
    played.segments = sorted(int(path.stem) for path in folder.glob("*.log"))
    return played


def reopened(folder: Path, rules: Settings = RULES, **changes: Any) -> State:
    async def look() -> State:
        journal, state = DiskJournal.open(folder, rules, limits(**changes))
        await journal.close()
        return state

    return asyncio.run(look())


def read(folder: Path) -> Any:
    """The state as plain values, without a change to the folder."""
    return plain(Archive(folder).state())


def records(path: Path, *kinds: Kind) -> list[record.Record]:
    found = record.scan(path.read_bytes(), int(path.stem))
    return [one for one in found if not kinds or one.kind in kinds]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    broken = bytearray(path.read_bytes())
    broken[offset] ^= 1 << bit
    path.write_bytes(broken)


def same(one: Trajectory, other: Trajectory) -> bool:
    return plain(one) == plain(other)


def long_trajectory(tokens: int = 2300) -> Trajectory:
    """About 20 KB at the default, with arrays large enough to be frames of their own."""
    action = np.arange(tokens) > tokens // 4
    return Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        action=action,
        logprobs=np.where(action, -0.5, 0.0).astype(np.float32),
        versions=[(0, int(action.sum()))],
        stop="eos",
        text="because " * 20,
    )
