"""The trainer's side of a publication, on the rank that leads.

    Offer -> Slot -> every rank writes or sends its pieces -> Commit or Seal -> Visible

All relays are served at once. One that is slow or gone holds up no other: who has answered is served, who answers later
is served then, until `weight_sync.publish_s` is over. `announce_forever` finds relays that were started anew and gives
them what they can have without the model: what is in shared memory or on disk. `lacking` tells of the others.
"""

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from async_rl.actor.remote import Remote
from async_rl.config.schema import WeightSync
from async_rl.errors import AsyncRLError, DeadlineExceeded, PublicationError
from async_rl.protocol.weight_sync import Commit, Delivery, Folder, Links, LoRAInfo, Seal, Shared, Slot
from async_rl.weights import disk
from async_rl.weights.carry import Bench, carry_out
from async_rl.weights.draft import Draft, draft
from async_rl.weights.line import Delivered, Line, Written
from async_rl.weights.links import Hub, hub_address
from async_rl.weights.manifest import Layout, check_buckets, clear_gaps, seal, spans
from async_rl.weights.order import Order, Outcome, Task, checksums_of
from async_rl.weights.slot import Maps
from async_rl.weights.source import move

if TYPE_CHECKING:
    from async_rl.weights.holdings import Model

ANNOUNCE_S = 1.0
ANNOUNCE_DEADLINE_S = 5.0  # of an announcement; a publication breaks it off
PATIENCE_S = 0.5  # that relays which have answered wait for the others
P = ParamSpec("P")
T = TypeVar("T")
Everywhere = Callable[[Order], Awaitable[list[Outcome]]]
log = logging.getLogger(__name__)


class Publisher:
    """Publishes versions of a model to the relays.

    relays: by name; entered already, speak WeightSyncRequest and WeightSyncReply.
    epoch: of this trainer; the relays refuse older ones.
    ranks, everywhere: of the trainer, and what has each of them carry out an order (`carry.carry_out`); its answer has
        the outcome of each. None: this process is the only rank.
    dtype: that floating tensors are published in; None: their own.
    folder: shared with the relays, for the transport "disk".
    peers: addresses (host:port) that the store of a collective must be reached from, beside loopback.
    """

    def __init__(
        self,
        relays: Mapping[str, Remote],
        settings: WeightSync,
        *,
        epoch: int,
        ranks: int = 1,
        everywhere: Everywhere | None = None,
        dtype: str | None = None,
        folder: Path | None = None,
        peers: list[str] | None = None,
    ) -> None:
        self._lines = [Line(name, remote, epoch, settings.publish_s) for name, remote in relays.items()]
        self._settings, self._epoch, self._ranks, self._dtype = settings, epoch, ranks, dtype
        self._folder, self._peers = folder, peers or []
        self._everywhere = everywhere or self._alone
        self._bench, self._maps = Bench(), Maps(writable=True)
        self._model: Model | None = None
        self._lora: LoRAInfo | None = None
        self._hub: Hub | None = None
        self._on_disk = -1  # the version that every rank wrote last
        self._version = -1  # the newest that was to be published
        self._lock = asyncio.Lock()  # one publication or round of announcements at a time
        self._announcing: asyncio.Task[None] | None = None
        self._thread: asyncio.Future[Any] | None = None  # may outlive the deadline of who started it

    @property
    def lacking(self) -> list[str]:
        """Relays that have not got the newest version; `publish` of the same version serves them alone."""
        return [line.name for line in self._lines if line.has != self._version]

    async def publish(self, version: int, model: "Model", lora: LoRAInfo | None = None) -> None:
        """Make the tensors of `model`, a module or names and tensors, visible as `version` at every relay that has not
        got it. They must not change until this returns. lora: what they are, where they are adapters.

        Raises PublicationError where a relay refuses it or `publish_s` passes: that relay's old version stays visible
        then, the others have the new one, and the next publication may work.
        """
        if self._announcing is not None:
            self._announcing.cancel()
        publish_s, errors = self._settings.publish_s, dict[str, str]()
        try:
            async with asyncio.timeout(publish_s), self._lock:
                self._version, self._model, self._lora = version, model, lora
                plan = await asyncio.to_thread(self._draft, model)
                await self._serve(version, plan, errors)
        except TimeoutError:
            for line in self._lines:
                if line.has != version and line.name not in errors:
                    line.failed()
                    errors[line.name] = self._late(version)
        if errors:
            named = [f"{name}: {error}" if len(self._lines) > 1 else error for name, error in errors.items()]
            raise PublicationError("; ".join(named))

    async def announce_forever(self) -> None:
        """Say again and again what was published last, and serve it to a relay that has lost it."""
        trouble: dict[str, str] = {}
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            async with self._lock:
                announcing = self._announcing = asyncio.create_task(self._announce(trouble), name="announcing")
                try:
                    await asyncio.wait({announcing})
                finally:
                    self._announcing = None
                    announcing.cancel()
                if not announcing.cancelled():
                    announcing.result()

    # --- a publication -------------------------------------------------------------------------------

    def _draft(self, model: "Model") -> Draft:
        return draft(model, self._ranks, self._receivers, self._settings.bucket_bytes, self._dtype)

    @property
    def _receivers(self) -> list[str]:
        return ["disk"] if self._settings.transport == "disk" else [line.name for line in self._lines]

    async def _serve(self, version: int, plan: Draft, errors: dict[str, str]) -> None:
        """Those who answer together in a round, those who answer later in one of their own."""
        offers = {asyncio.ensure_future(line.patiently(self._offer(line, version, plan))): line for line in self._lines}
        try:
            while offers:
                await asyncio.wait(offers, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(offers, timeout=PATIENCE_S)
                slots: dict[Line, Slot] = {}
                for answer in [offer for offer in offers if offer.done()]:
                    line = offers.pop(answer)
                    try:
                        slot = answer.result()
                    except AsyncRLError as error:
                        self._fail(line, version, error, errors)
                        continue
                    line.doubtful = False
                    if slot is not None:
                        slots[line] = slot
                if slots:
                    await self._round(version, plan, slots, errors)
        finally:
            for offer in offers:
                offer.cancel()

    async def _offer(self, line: Line, version: int, plan: Draft) -> Slot | None:
        await line.adopt()
        delta = line.deltas < self._settings.full_every - 1
        return await line.offer(version, plan.nbytes, line.has if delta else -1)

    async def _round(self, version: int, plan: Draft, slots: dict[Line, Slot], errors: dict[str, str]) -> None:
        """Bring the version to `slots` and have it shown there."""
        try:
            tasks = await self._tasks(version, plan, slots, errors)
            if not tasks:
                return
            order = Order(version, [task for task, _ in tasks], deltas=self._settings.full_every > 1)
            outcomes = await self._everywhere(order)
            finishing = [
                self._finish(line, slots[line], task.delivery, checksums_of(k, outcomes), errors)
                for k, (task, lines) in enumerate(tasks)
                for line in lines
            ]
            await asyncio.gather(*finishing)
            if isinstance(order.tasks[0].delivery.way, Folder) and not errors:  # a relay may yet load the older one
                await asyncio.to_thread(disk.tidy, Path(order.tasks[0].delivery.way.path), self._epoch, version)
        except AsyncRLError as error:  # a rank that did not carry it out
            for line in slots:
                if line.has != version and line.name not in errors:
                    self._fail(line, version, error, errors)

    async def _tasks(
        self, version: int, plan: Draft, slots: dict[Line, Slot], errors: dict[str, str]
    ) -> list[tuple[Task, list[Line]]]:
        """What the ranks are to do, and for whom. Over a network the relays are ready for it when this returns."""
        settings = self._settings
        if settings.transport == "disk":
            bases = {self._base(line, slot) for line, slot in slots.items()}
            base = self._on_disk if bases == {self._on_disk} else -1  # one file for all
            self._on_disk = version
            delivery = self._delivery(version, plan, "disk", base, Folder(str(self._folder)))
            return [(Task("disk", delivery), list(slots))]
        ready = await asyncio.gather(*(self._ready(line, slot, version, plan, errors) for line, slot in slots.items()))
        return [
            (Task(line.name, delivery), [line])
            for line, delivery in zip(slots, ready, strict=True)
            if delivery is not None
        ]

    async def _ready(
        self, line: Line, slot: Slot, version: int, plan: Draft, errors: dict[str, str]
    ) -> Delivery | None:
        """What goes to a relay that is ready for it; None where it failed."""
        if self._settings.transport == "shm":
            delivery = self._delivery(version, plan, line.name, -1, Shared(slot.path))
            await self._in_thread(clear_gaps, delivery.tensors, self._maps.open(slot.path))
            return delivery
        operation_s = self._settings.operation_s
        delivery = self._delivery(version, plan, line.name, self._base(line, slot), self._links(line))
        try:
            async with asyncio.timeout(operation_s):  # the others in this round wait for it
                await line.receive(delivery, slot.path)
        except TimeoutError:
            error = DeadlineExceeded(f"the readiness of {line.name}", operation_s, "weight_sync.operation_s")
            self._fail(line, version, PublicationError(f"version {version}: {error}"), errors)
        except AsyncRLError as error:
            self._fail(line, version, error, errors)
        else:
            return delivery
        return None

    def _delivery(self, version: int, plan: Draft, receiver: str, base: int, way: Shared | Links | Folder) -> Delivery:
        pieces, bucket_bytes = plan.pieces[receiver], self._settings.bucket_bytes
        return Delivery(version, self._epoch, plan.nbytes, plan.tensors, pieces, bucket_bytes, base, way, self._lora)

    def _base(self, line: Line, slot: Slot) -> int:
        """The version that a delta to this relay builds on; -1: all of it goes."""
        return line.has if slot.base else -1

    def _links(self, line: Line) -> Links:
        if self._hub is None:
            self._hub = Hub(hub_address(self._peers))
        settings = self._settings
        return Links(self._hub.host, self._hub.port, line.generation, settings.device, settings.operation_s)

    async def _finish(
        self,
        line: Line,
        slot: Slot,
        delivery: Delivery,
        checksums: list[list[int]] | str,
        errors: dict[str, str],
    ) -> None:
        try:
            if isinstance(checksums, str):
                raise PublicationError(f"version {delivery.version}: {checksums}")
            if isinstance(delivery.way, Shared):
                await self._commit(line, delivery, self._maps.open(slot.path), checksums)
            else:
                if isinstance(delivery.way, Folder):
                    await line.receive(delivery, slot.path)
                await line.show(delivery.version, Seal(delivery.version, self._epoch, checksums))
                line.last = Delivered(delivery, checksums)
                line.deltas = line.deltas + 1 if delivery.base >= 0 else 0
        except AsyncRLError as error:
            self._fail(line, delivery.version, error, errors)

    async def _commit(self, line: Line, delivery: Delivery, slot: mmap.mmap, checksums: list[list[int]]) -> None:
        assert isinstance(delivery.way, Shared)
        bucket_spans = spans(delivery.nbytes, delivery.bucket_bytes)
        layout = Layout(delivery.tensors, bucket_spans, delivery.nbytes)
        found = next((sums for sums in checksums if sums), [])
        known = dict(zip(bucket_spans, found, strict=True)) if found else {}
        manifest = await asyncio.to_thread(
            seal, layout, slot, version=delivery.version, epoch=delivery.epoch, known=known
        )
        manifest = msgspec.structs.replace(manifest, lora=delivery.lora)
        await line.show(delivery.version, Commit(manifest, delivery.way.path))
        line.last = Written(manifest, delivery.way.path, slot)

    def _fail(self, line: Line, version: int, error: AsyncRLError, errors: dict[str, str]) -> None:
        line.failed()
        late = isinstance(error, DeadlineExceeded)
        errors[line.name] = f"{self._late(version)}: {error}" if late else str(error)

    def _late(self, version: int) -> str:
        publish_s = self._settings.publish_s
        return (
            f"version {version} did not become visible within {publish_s:g} s (weight_sync.publish_s = {publish_s:g})"
        )

    # --- announcements -------------------------------------------------------------------------------

    async def _announce(self, trouble: dict[str, str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for line in self._lines:
                if line.last is not None:
                    tasks.create_task(self._announce_to(line, trouble), name=f"announcing to {line.name}")

    async def _announce_to(self, line: Line, trouble: dict[str, str]) -> None:
        news = ""
        try:
            async with asyncio.timeout(ANNOUNCE_DEADLINE_S):
                match line.last:
                    case Written() as last:
                        if not await line.adopt():
                            await self._write_again(line, last)
                    case Delivered() as last:
                        await line.ask_version(last.delivery.version)
                        if line.has != last.delivery.version:
                            await self._load_again(line, last)
        except (TimeoutError, AsyncRLError) as error:  # `publish` raises what matters; here it is news
            news = str(error) or f"no answer within {ANNOUNCE_DEADLINE_S:g} s"
        if news and news != trouble.get(line.name):
            log.warning("%s was not told of the newest version: %s", line.name, news)
        trouble[line.name] = news

    async def _write_again(self, line: Line, last: Written) -> None:
        """The last version into a slot of the relay, from the map that this process still holds."""
        manifest = last.manifest
        if await self._in_thread(check_buckets, manifest, last.bytes):
            line.last = None
            raise PublicationError(f"version {manifest.version} is overwritten; the next is served")
        slot = await line.offer(manifest.version, manifest.nbytes, -1)
        if slot is None:
            return
        self._maps.forget(slot.path)  # where it is the old path, it may be the old file no more
        buffer = self._maps.open(slot.path)
        await self._in_thread(move, buffer, last.bytes, manifest.nbytes)
        await line.show(manifest.version, Commit(manifest, slot.path))
        line.last = Written(manifest, slot.path, buffer)

    async def _load_again(self, line: Line, last: Delivered) -> None:
        """From disk, where all of the version is there; a version that came over a network, or as a difference, is
        the trainer's to publish again (`lacking`)."""
        delivery = last.delivery
        if not isinstance(delivery.way, Folder) or delivery.base >= 0:
            raise PublicationError(f"it has lost version {delivery.version}, which is published again")
        slot = await line.offer(delivery.version, delivery.nbytes, -1)
        if slot is not None:
            await line.receive(delivery, slot.path)
            await line.show(delivery.version, Seal(delivery.version, self._epoch, last.checksums))

    # --- threads -------------------------------------------------------------------------------------

    async def _alone(self, order: Order) -> list[Outcome]:
        assert self._model is not None
        return [await self._in_thread(carry_out, order, 0, self._model, self._bench)]

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, after the one before it has ended: two never write to the same map."""
        if self._thread is not None:
            await asyncio.wait({self._thread})
        thread = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        self._thread = thread
        return await asyncio.shield(thread)
