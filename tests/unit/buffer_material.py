"""Settings, trajectories and scores for the tests of the buffer, and commands that prepare a machine."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from async_rl.buffers.group import Group, Lease, Place
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch
from async_rl.buffers.store import KeptDraw, MemoryStore
from async_rl.errors import JournalDamaged
from async_rl.trajectory import Score, Spans, Trajectory

PLAIN = Settings(
    groups=2,
    group_size=2,
    min_valid=1,
    eta=1,
    reuse=1,
    on_exceed="wait",
    hard_max=None,
    in_flight=True,
    max_steps=10,
    tasks=None,
    at_end="smaller_step",
    max_failures=4,
    lease_s=30.0,
    lease_max_s=3600.0,
    held_out=0,
    samples=1,
)


def settings(**changes: Any) -> Settings:
    return msgspec.structs.replace(PLAIN, **changes)


def trajectory(*spans: tuple[int, int], stop: str = "eos") -> Trajectory:
    """One prompt token, then the action tokens of `spans`, [(version, count), ...]."""
    actions = sum(count for _, count in spans)
    action = np.array([False] + [True] * actions)
    return Trajectory(
        tokens=np.arange(actions + 1, dtype=np.int32),
        action=action,
        logprobs=np.where(action, -1.0, 0.0).astype(np.float32),
        versions=list(spans),
        stop=stop,  # type: ignore[arg-type]
        text="",
    )


class Rotting(MemoryStore):
    """Keeps every draw, and loses the trajectories at the places that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[int, KeptDraw] = {}
        self.rotten: list[Place] = []  # these objects, kept: an id alone is given to a new one

    def rot(self, place: Place) -> None:
        self.rotten.append(place)

    def get(self, place: Place) -> Trajectory:
        if any(place is one for one in self.rotten):
            raise JournalDamaged("bytes 1 to 2 are not those that were written")
        return super().get(place)

    def put_draw(self, draw: KeptDraw) -> Place:
        self.draws[draw.step] = draw
        return super().put_draw(draw)

    def get_draw(self, place: Place) -> KeptDraw:
        return self.draws[place.offset]


def versions(machine: Machine, group: Group, member: int) -> Spans:
    """Of the member's action tokens."""
    return machine.store.get(group.trajectories[member].place).versions


def plain(value: Any) -> Any:
    """A state as plain values that compare by `==`."""
    match value:
        case msgspec.Struct():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case dict():
            return {repr(key): plain(item) for key, item in value.items()}
        case set():
            return sorted(value)
        case np.ndarray():
            return value.tolist()
        case str():
            return value
        case Sequence():
            return [plain(item) for item in value]
        case _:
            return value


def generate(machine: Machine, lease: Lease, *, at: int, now: float = 0.0, members: int | None = None) -> None:
    """The holder finishes the lease (or its first `members` members) with one token each of version `at`."""
    for member in list(lease.open)[:members]:
        reply = machine.workers.finish_generate(
            lease.worker, lease.incarnation, lease.id, member, trajectory((at, 1)), now
        )
        assert reply.outcome == "accepted", reply


def grade(machine: Machine, *, now: float = 0.0, reward: float | None = 1.0, status: str = "graded") -> None:
    """A reward worker scores all that is generated."""
    while leases := machine.workers.acquire("reward-0", "r", "score", 64, -1, now):
        for lease in leases:
            for member in list(lease.open):
                score = Score(reward, status)  # type: ignore[arg-type]
                reply = machine.workers.finish_score("reward-0", "r", lease.id, member, score, now)
                assert reply.outcome == "accepted", reply


def rollout(machine: Machine, n: int, *, at: int, now: float = 0.0, worker: str = "rollout-0") -> list[Lease]:
    return machine.workers.acquire(worker, "i", "generate", n, at, now)


def ready_groups(machine: Machine, count: int, *, at: int, now: float = 0.0) -> list[int]:
    """Bring `count` new groups to ready with tokens of version `at`."""
    leases = rollout(machine, count * machine.settings.group_size, at=at, now=now)
    assert len(leases) == count
    for lease in leases:
        generate(machine, lease, at=at, now=now)
    grade(machine, now=now)
    return [lease.id.group for lease in leases]


def train(machine: Machine, step: int) -> list[int]:
    """Draw and finish `step`; the ids of its groups."""
    batch = machine.trainer.draw(step, 0)
    assert isinstance(batch, Batch), batch
    numbers = [group.id for group in batch.groups]
    machine.trainer.finish_step(step, 0)
    return numbers
