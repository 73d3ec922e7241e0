"""What the leading rank tells the others of a publication, and what each says when it is done. Encoded by msgspec.

An order holds a task for each way that the bytes take: one for each relay, or one for all of them where they read the
same files.
"""

import msgspec

from async_rl.protocol.weight_sync import Delivery


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """name: of the relay that it serves, or "disk"; a rank keeps under it what the next delta needs."""

    name: str
    delivery: Delivery


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tasks: list[Task]
    deltas: bool = False  # keep what the next publication, a delta, compares with


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a task. `checksums`: of the rank's parcels; over shared memory of the slot's buckets, where the
    rank wrote all of it."""

    error: str = ""
    checksums: list[int] = []


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    parts: list[Part]  # of each task


def checksums_of(task: int, outcomes: list[Outcome]) -> list[list[int]] | str:
    """By rank, or why there are none."""
    in_order = sorted(outcomes, key=lambda outcome: outcome.rank)
    for outcome in in_order:
        if outcome.parts[task].error:
            return f"rank {outcome.rank}: {outcome.parts[task].error}"
    return [outcome.parts[task].checksums for outcome in in_order]
