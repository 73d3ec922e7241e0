"""The weight-sync service: one relay a host, between the trainer and the rollouts.

The trainer writes a slot and commits it, or sends what the relay takes into a slot; the relay verifies every byte of
it and then makes the version visible, last. Waiting fetches get it at once. A publication that fails leaves the old
version visible, and the next one works. What a relay that was started anew does not know, the trainer announces to it.
"""

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from async_rl.actor.service import Service
from async_rl.config.schema import Config
from async_rl.errors import PublicationError
from async_rl.protocol.control import Done
from async_rl.protocol.weight_sync import (
    Announce,
    Commit,
    Delivery,
    Fence,
    Fetch,
    Manifest,
    NoNewer,
    Offer,
    Receive,
    Rejected,
    Release,
    Released,
    Seal,
    Slot,
    Visible,
    Weights,
    WeightSyncReply,
    WeightSyncRequest,
)
from async_rl.services.weight_sync.slots import Have, Refuse, SlotTable, Write
from async_rl.weights.manifest import check_buckets, check_layout
from async_rl.weights.parcels import coverage_problem
from async_rl.weights.slot import Maps, Slots

if TYPE_CHECKING:
    from async_rl.weights.links import Groups
    from async_rl.weights.receiving import Reception

log = logging.getLogger(__name__)


class WeightSyncService(Service):
    kind = "weight_sync"
    requests: ClassVar[Any] = WeightSyncRequest
    replies: ClassVar[Any] = WeightSyncReply

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._table = SlotTable(config.weight_sync.slots)
        self._table.fence(self.run.trainer_epoch())
        self._slots = Slots(config.weight_sync.directory, self.run.path, name)
        self._maps, self._shadows = Maps(writable=False), Maps(writable=True)
        self._groups: Groups | None = None  # over which a trainer sends; made when one does
        self._reception: tuple[Reception, str] | None = None  # what comes in, and into which slot
        self._publishing = asyncio.Lock()  # the trainer's requests one by one: a slot is verified, then given away
        self._news = asyncio.Condition()
        self._published = self._rejected = self._revoked = 0

    async def work(self) -> None:
        """Nothing of its own to do: wait for the stop, let go of who waits, take the slots away."""
        try:
            await self.stopping.wait()
            async with self._news:
                self._news.notify_all()
        finally:
            self._slots.remove()

    async def handle(self, request: Any) -> Any:
        match request:
            case Fence(epoch=epoch):
                self._table.fence(epoch)
                return Done()
            case Offer():
                async with self._publishing:
                    return await self._offer(request)
            case Commit():
                async with self._publishing:
                    return await self._commit(request)
            case Receive():
                async with self._publishing:
                    return await self._receive(request.delivery, request.path)
            case Seal():
                async with self._publishing:
                    return await self._seal(request)
            case Announce(epoch=epoch):
                visible = self._table.visible()
                return Visible(visible[1].version if visible is not None and visible[1].epoch == epoch else -1)
            case Fetch():
                return await self._fetch(request)
            case Release(worker=worker, ticket=ticket):
                return Released(self._table.release(worker, ticket))

    async def _offer(self, offer: Offer) -> Slot | Rejected:
        match self._table.offer(offer.version, offer.epoch):
            case Refuse(reason=reason):
                return self._reject(offer.version, reason)
            case Have():
                return Slot("", have=True)
            case Write(index=index, fresh=fresh, revoked=revoked):
                if revoked:
                    self._revoked += len(revoked)
                    log.warning("slot %d is taken back from %s (weight_sync.slots)", index, ", ".join(revoked))
                try:
                    path = await asyncio.to_thread(self._slots.allocate, index, offer.nbytes, fresh=fresh)
                    base = self._table.visible() if self._table.holds(offer.base, offer.epoch) else None
                    if base is not None and base[1].nbytes == offer.nbytes:
                        await asyncio.to_thread(self._copy_over, self._slots.path(base[0]), path, offer.nbytes)
                        return Slot(path, base=True, incarnation=self.incarnation)
                    return Slot(path, incarnation=self.incarnation)
                except PublicationError as error:
                    self._table.give_up()
                    return self._reject(offer.version, str(error))

    def _copy_over(self, source: str, path: str, nbytes: int) -> None:
        """What a delta is going to build on."""
        from async_rl.weights.source import move

        move(self._shadows.open(path), self._maps.open(source), nbytes)

    async def _commit(self, commit: Commit) -> Visible | Rejected:
        manifest, index = commit.manifest, self._slots.index(commit.path)
        known = self._judge(manifest, index)
        if known is not None:
            return known
        wrong = await asyncio.to_thread(self._verify, manifest, commit.path)
        return await self._show(manifest, index, wrong)

    async def _receive(self, delivery: Delivery, path: str) -> Done | Rejected:
        from async_rl.weights.links import RELAY, Groups
        from async_rl.weights.receiving import Reception

        index = self._slots.index(path)
        if index is None or index != self._table.writing:
            return self._reject(delivery.version, f"{path} is not the slot that was given")
        problem = coverage_problem(delivery)
        if problem:
            return self._reject(delivery.version, problem)
        if delivery.base >= 0 and not self._table.holds(delivery.base, delivery.epoch):
            return self._reject(delivery.version, f"version {delivery.base}, on which it builds, is not here")
        self._groups = self._groups or Groups(RELAY)
        device, slot = self.config.weight_sync.device, self._shadows.open(path)
        reception = await asyncio.to_thread(Reception, delivery, self.name, device, slot, self._groups)
        self._reception = reception, path
        return Done()

    async def _seal(self, seal: Seal) -> Visible | Rejected:
        if self._table.holds(seal.version, seal.epoch):
            return Visible(seal.version)
        reception, path = self._reception or (None, "")
        asked = seal.version, seal.epoch
        if reception is None or (reception.delivery.version, reception.delivery.epoch) != asked:
            return self._reject(seal.version, "none of it was announced here")
        try:
            received = await asyncio.to_thread(reception.wait)
        except PublicationError as error:
            return self._reject(seal.version, str(error))
        finally:
            self._reception = None
        wrong = [
            f"checksum of parcel {k} of rank {rank} is wrong"
            for rank, (ours, theirs) in enumerate(itertools.zip_longest(received, seal.checksums, fillvalue=()))
            for k, (one, other) in enumerate(itertools.zip_longest(ours, theirs))
            if one != other
        ]
        if wrong:
            return self._reject(seal.version, wrong[0])
        manifest, index = await asyncio.to_thread(reception.manifest, received), self._slots.index(path)
        return self._judge(manifest, index) or await self._show(manifest, index, check_layout(manifest))

    def _judge(self, manifest: Manifest, index: int | None) -> Visible | Rejected | None:
        """The answer where the table knows one; None: it may become visible, once its bytes are verified."""
        match self._table.judge(manifest, index):
            case Refuse(reason=reason):
                return self._reject(manifest.version, reason)
            case Have():
                return Visible(manifest.version)
        return None

    async def _show(self, manifest: Manifest, index: int | None, wrong: list[str]) -> Visible | Rejected:
        """wrong: what was found in it, one line each."""
        if wrong:
            return self._reject(manifest.version, wrong[0])
        assert index is not None
        self._table.show(manifest, index)
        self.version = manifest.version
        self._published += 1
        log.info("version %d is visible: %d bytes in slot %d", manifest.version, manifest.nbytes, index)
        async with self._news:
            self._news.notify_all()
        return Visible(manifest.version)

    def _verify(self, manifest: Manifest, path: str) -> list[str]:
        """What is wrong with the slot, read in a thread so that heartbeats go on."""
        wrong = check_layout(manifest)
        if wrong:
            return wrong
        try:
            buffer = self._maps.open(path)
        except PublicationError as error:
            return [str(error)]
        if len(buffer) < manifest.nbytes:
            return [f"slot {path} has {len(buffer)} of {manifest.nbytes} bytes"]
        return [f"checksum of bucket {k} is wrong" for k in check_buckets(manifest, buffer)]

    def _reject(self, version: int, reason: str) -> Rejected:
        self._rejected += 1
        log.warning("version %d is rejected: %s; visible stays %d", version, reason, self._table.version)
        return Rejected(reason)

    async def _fetch(self, fetch: Fetch) -> Weights | NoNewer:
        turn = self._table.begin(fetch.worker)

        def over() -> bool:
            newer = self._table.version > fetch.have
            return newer or self.stopping.is_set() or not self._table.is_due(fetch.worker, turn)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(fetch.wait_s), self._news:
                self._news.notify_all()  # an older fetch of this worker is void now
                await self._news.wait_for(over)
        visible = self._table.visible()
        if visible is None or self._table.version <= fetch.have or not self._table.is_due(fetch.worker, turn):
            return NoNewer(self._table.version)
        index, manifest = visible
        return Weights(manifest, self._slots.path(index), self._table.read(fetch.worker).number)

    def detail(self) -> dict[str, float | int | str]:
        return {
            "published": self._published,
            "rejected": self._rejected,
            "revoked": self._revoked,
            "readers": self._table.readers,
        }
