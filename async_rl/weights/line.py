"""One relay as the trainer knows it: what it has, and how it is spoken to."""

import asyncio
import mmap
from typing import Any

import msgspec

from async_rl.actor.remote import Remote
from async_rl.errors import PublicationError
from async_rl.protocol.control import Done
from async_rl.protocol.weight_sync import (
    Announce,
    Commit,
    Delivery,
    Manifest,
    Offer,
    Receive,
    Rejected,
    Seal,
    Slot,
    Visible,
)

DOUBT_S = 2.0  # for the answer of a relay whose last publication failed: it holds up no further one for longer


class Written(msgspec.Struct, frozen=True):
    """A slot in shared memory that this process wrote, and may announce again."""

    manifest: Manifest
    path: str
    bytes: mmap.mmap  # kept: still there where the relay has deleted its slots


class Delivered(msgspec.Struct, frozen=True):
    """What a relay can load again from disk, and its checksums."""

    delivery: Delivery
    checksums: list[list[int]]


class Line:
    def __init__(self, name: str, remote: Remote, epoch: int, answer_s: float) -> None:
        """answer_s: `weight_sync.publish_s`, within which a relay may verify what it was given."""
        self.name = name
        self.has = -1  # the version that it said to have, of this trainer
        self.doubtful = False  # its last publication failed
        self.generation = 0  # of the groups of two with it
        self.deltas = 0  # since the last full publication
        self.last: Written | Delivered | None = None
        self._remote, self._epoch, self._answer_s = remote, epoch, answer_s
        self._incarnation = ""

    async def offer(self, version: int, nbytes: int, base: int) -> Slot | None:
        """Where `version` goes; None where the relay has it already. Raises PublicationError where it refuses."""
        reply = await self._ask(Offer(version, self._epoch, nbytes, base))
        match reply:
            case Slot(have=True):
                self.has = version
                return None
            case Slot():
                if reply.incarnation != self._incarnation:
                    self.generation += 1
                    self._incarnation = reply.incarnation
                return reply
        raise self._refused(version, reply)

    async def receive(self, delivery: Delivery, path: str) -> None:
        reply = await self._ask(Receive(delivery, path))
        if not isinstance(reply, Done):
            raise self._refused(delivery.version, reply)

    async def show(self, version: int, message: Commit | Seal) -> None:
        """Make what was brought there visible."""
        reply = await self._ask(message)
        if not isinstance(reply, Visible):
            raise self._refused(version, reply)
        self.has = version

    async def adopt(self) -> bool:
        """Announce what was written last: the relay verifies the slot where it does not know it. Comes before every
        offer, too: a relay started anew must know the slot before it gives one away."""
        if not isinstance(self.last, Written):
            return True
        reply = await self._ask(Commit(self.last.manifest, self.last.path))
        self.has = self.last.manifest.version if isinstance(reply, Visible) else -1
        return isinstance(reply, Visible)

    async def ask_version(self, version: int) -> None:
        """Find out what the relay has."""
        reply = await self._ask(Announce(version, self._epoch))
        self.has = reply.version if isinstance(reply, Visible) else -1

    def failed(self) -> None:
        """A publication failed: nothing that it left can be built on."""
        self.doubtful = True
        self.generation += 1
        self.has = -1

    async def patiently(self, work: Any) -> Any:
        """`work` of this relay, which must answer soon if it did not last time. Raises PublicationError."""
        if not self.doubtful:
            return await work
        try:
            async with asyncio.timeout(DOUBT_S):
                return await work
        except TimeoutError:
            raise PublicationError(
                f"{self.name} failed the last time and has not answered within {DOUBT_S:g} s now"
            ) from None

    async def _ask(self, message: Any) -> Any:
        return await self._remote.ask(message, wait_s=self._answer_s)

    def _refused(self, version: int, reply: object) -> PublicationError:
        said = reply.reason if isinstance(reply, Rejected) else f"{self.name} answered {type(reply).__name__}"
        return PublicationError(f"version {version}: {said}")
