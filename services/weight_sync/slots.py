"""The slot table: which slot is visible, which is being written, which is read by whom.

Pure: no socket, no clock, no file. A slot for the trainer is always found: where there is none to spare, the
reader that began longest ago loses its own. The trainer never waits for a rollout.
"""

import itertools

import msgspec

from async_rl.protocol.weight_sync import Manifest
from async_rl.weights.manifest import check_names, shapes_of


class Write(msgspec.Struct, frozen=True):
    """Write into slot `index`. `fresh`: into a new file, since an unknown hand may be on the old one."""

    index: int
    fresh: bool
    revoked: list[str]  # workers whose reading is void now


class Have(msgspec.Struct, frozen=True):
    """The version is visible already."""


class Refuse(msgspec.Struct, frozen=True):
    reason: str


class Ticket(msgspec.Struct, frozen=True):
    number: int
    worker: str
    index: int


class SlotTable:
    """`count` slots (`weight_sync.slots`, at least 2): one visible, one written, the rest read or free."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._visible: tuple[int, Manifest] | None = None
        self._writing: int | None = None
        self._unknown = set(range(count))  # what an earlier process left; readers of it have no ticket here
        self._epoch = 0
        self._tickets: dict[int, Ticket] = {}
        self._released: dict[str, int] = {}  # the last ticket that each worker gave back in order
        self._turns: dict[str, int] = {}
        self._numbers = itertools.count(1)

    @property
    def version(self) -> int:
        """The visible version; -1 where there is none yet."""
        return self._visible[1].version if self._visible else -1

    @property
    def readers(self) -> int:
        return len(self._tickets)

    @property
    def writing(self) -> int | None:
        """The slot that the trainer was given last, until its version is visible."""
        return self._writing

    def holds(self, version: int, epoch: int) -> bool:
        """Whether `version` of the trainer of `epoch` is visible."""
        return self._is_visible(version, epoch)

    def visible(self) -> tuple[int, Manifest] | None:
        """(slot, manifest) of the visible version."""
        return self._visible

    # --- the trainer's side --------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """A trainer of `epoch` began: older ones are refused from here on."""
        self._epoch = max(self._epoch, epoch)

    def offer(self, version: int, epoch: int) -> Write | Have | Refuse:
        """Where the trainer of `epoch` may write `version`; what it was writing before is given up."""
        refusal = self._refusal(version, epoch)
        if refusal is not None:
            return refusal
        if self._is_visible(version, epoch):
            return Have()
        self.fence(epoch)
        abandoned, self._writing = self._writing, None
        if abandoned is not None:
            self._unknown.add(abandoned)  # its writer may be at it still
        index = self._spare()
        revoked = [ticket for ticket in self._tickets.values() if ticket.index == index]
        for ticket in revoked:
            del self._tickets[ticket.number]
        fresh = index in self._unknown
        self._unknown.discard(index)
        self._writing = index
        return Write(index, fresh, [ticket.worker for ticket in revoked])

    def give_up(self) -> None:
        """The slot that was offered could not be made, or holds no valid version."""
        self._writing = None

    def judge(self, manifest: Manifest, index: int | None) -> Have | Refuse | None:
        """Whether `manifest` in slot `index` may become visible; None: yes, once its bytes are verified."""
        refusal = self._refusal(manifest.version, manifest.epoch)
        if refusal is not None:
            return refusal
        if self._is_visible(manifest.version, manifest.epoch):
            return Have()
        if index is None or index >= self._count:
            return Refuse("the path is no slot of this run")
        if self._visible is not None:
            if index == self._visible[0]:
                return Refuse(f"slot {index} holds the visible version {self.version}")
            wrong = check_names(manifest, shapes_of(self._visible[1]))
            if wrong:
                return Refuse(f"not the model of version {self.version}: {wrong[0]}")
        if any(ticket.index == index for ticket in self._tickets.values()):
            return Refuse(f"slot {index} is being read")
        return None

    def show(self, manifest: Manifest, index: int) -> None:
        """Make the verified `manifest` in slot `index` the visible version."""
        self.fence(manifest.epoch)
        self._visible = (index, manifest)
        self._unknown.discard(index)
        if self._writing == index:
            self._writing = None

    # --- the rollouts' side --------------------------------------------------------------------------

    def begin(self, worker: str) -> int:
        """A fetch of `worker` begins: what it read before is over, and a fetch that still waits is void.

        So a worker that was started anew, or lost an answer, never holds two slots. Returns its turn.
        """
        for number in [n for n, ticket in self._tickets.items() if ticket.worker == worker]:
            del self._tickets[number]
        self._turns[worker] = self._turns.get(worker, 0) + 1
        return self._turns[worker]

    def is_due(self, worker: str, turn: int) -> bool:
        """Whether the fetch of `worker` that began with `turn` is its newest."""
        return self._turns.get(worker) == turn

    def read(self, worker: str) -> Ticket:
        """A ticket to read the visible slot."""
        assert self._visible is not None
        ticket = Ticket(next(self._numbers), worker, self._visible[0])
        self._tickets[ticket.number] = ticket
        return ticket

    def release(self, worker: str, number: int) -> bool:
        """Reading is over; False where the ticket was revoked. A repeat gets its first answer."""
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.worker == worker:
            del self._tickets[number]
            self._released[worker] = number
            return True
        return self._released.get(worker) == number

    # -------------------------------------------------------------------------------------------------

    def _refusal(self, version: int, epoch: int) -> Refuse | None:
        if epoch < self._epoch:
            return Refuse(f"trainer epoch {epoch} is older than {self._epoch}")
        if version < self.version:
            return Refuse(f"version {version} is older than the visible {self.version}")
        return None

    def _is_visible(self, version: int, epoch: int) -> bool:
        return self._visible is not None and (self.version, self._visible[1].epoch) == (version, epoch)

    def _spare(self) -> int:
        """The slot to write next: one that nobody reads, else the one whose last reader began longest ago."""
        visible = self._visible[0] if self._visible else None
        newest = {ticket.index: ticket.number for ticket in self._tickets.values()}
        return min(
            (index for index in range(self._count) if index != visible),
            key=lambda index: (newest.get(index, 0), index in self._unknown, index),
        )
