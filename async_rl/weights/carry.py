"""A rank's part of a publication: carry out the leading rank's order.

outcome = carry_out(order, rank, model, bench)      # in a thread; on every rank, with the same order
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from async_rl.errors import AsyncRLError
from async_rl.protocol.weight_sync import Links, Shared
from async_rl.weights import disk, shm
from async_rl.weights.delta import Base, known, layout_of
from async_rl.weights.links import RANK, Groups
from async_rl.weights.order import Order, Outcome, Part, Task
from async_rl.weights.parcels import Parcel, parcels
from async_rl.weights.sending import Outgoing, Sent, send_all, send_changed
from async_rl.weights.slot import Maps
from async_rl.weights.source import Source

if TYPE_CHECKING:
    from async_rl.weights.holdings import Model


class Bench:
    """What a rank's process keeps between publications: maps of slots, groups, the sums that deltas compare with."""

    def __init__(self) -> None:
        self.maps = Maps(writable=True)
        self.groups = Groups(RANK)
        self.bases: dict[str, Base] = {}  # by task
        self.lock = threading.Lock()  # a publication that was given up is at an end before the next one begins


def carry_out(order: Order, rank: int, model: "Model", bench: Bench) -> Outcome:
    """Bring this rank's pieces to where `order` wants them. An error is that of its task alone and part of the outcome.

    model: a module, or names and tensors; it must not change meanwhile.
    """
    with bench.lock, torch.no_grad():
        if len(order.tasks) == 1:
            return Outcome(rank, [_carry(order.tasks[0], rank, model, bench, order.deltas)])
        with ThreadPoolExecutor(len(order.tasks), "publishing") as pool:
            parts = pool.map(lambda task: _carry(task, rank, model, bench, order.deltas), order.tasks)
            return Outcome(rank, list(parts))


def _carry(task: Task, rank: int, model: "Model", bench: Bench, deltas: bool) -> Part:
    delivery = task.delivery
    try:
        source = Source(model, delivery.tensors)
        if isinstance(delivery.way, Shared):
            slot = bench.maps.open(delivery.way.path)
            return Part(checksums=shm.write(delivery, rank, source, slot))
        own = parcels(delivery.tensors, delivery.pieces[rank], delivery.bucket_bytes)
        before = known(bench.bases.pop(task.name, None), delivery, rank) if delivery.base >= 0 else None
        sent = Sent([], []) if not own else _send(task, rank, source, own, bench, before, deltas)
        if deltas:
            bench.bases[task.name] = Base(delivery.version, layout_of(delivery, rank), sent.sums)
        return Part(checksums=sent.checksums)
    except AsyncRLError as error:
        return Part(str(error))
    except Exception as error:  # whatever it is, the others' tasks go on and the leading rank is told
        return Part(f"{type(error).__name__}: {error}")


def _send(
    task: Task, rank: int, source: Source, own: list[Parcel], bench: Bench, before: Base | None, deltas: bool
) -> Sent:
    delivery, cpu = task.delivery, torch.device("cpu")
    if isinstance(delivery.way, Links):
        device = torch.device(delivery.way.device.partition(":")[0])
        channel = bench.groups.channel(delivery.way, rank, task.name)
        if before is None:
            return send_all(own, source, channel, device, sums=deltas)
        return send_changed(own, source, lambda _: channel, before.sums, delivery.bucket_bytes, device)
    file = disk.file_of(delivery, rank)
    about = {"version": str(delivery.version), "base": str(delivery.base), "rank": str(rank)}
    if before is None:
        with disk.Writing(file) as whole:
            whole.begin(disk.described(delivery.tensors, own), about)
            return send_all(own, source, whole, cpu, sums=deltas)
    with disk.Writing(file) as difference:

        def open_(nbytes: int) -> Outgoing:
            difference.begin(disk.described_delta(own, nbytes), about)
            return difference

        return send_changed(own, source, open_, before.sums, delivery.bucket_bytes, cpu)
