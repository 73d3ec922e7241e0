"""The trainer's side of a publication.

    Offer -> Slot -> write the tensors and their checksums -> Commit -> Visible

`announce_forever` repeats the last Commit, so that a relay that was started anew has the weights again
without the trainer's help, also while the trainer waits for a draw.
"""

import asyncio
import logging
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from async_rl.actor.remote import Remote
from async_rl.errors import AsyncRLError, DeadlineExceeded, PublicationError
from async_rl.protocol.weight_sync import Commit, LoRAInfo, Manifest, Offer, Rejected, Slot, Visible
from async_rl.weights.manifest import Layout, check_buckets, gaps, plan, seal
from async_rl.weights.slot import Maps

if TYPE_CHECKING:
    import torch

ANNOUNCE_S = 1.0
ANNOUNCE_DEADLINE_S = 5.0  # an announcement holds up a publication for no longer
P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class _Published(msgspec.Struct, frozen=True):
    manifest: Manifest
    path: str
    bytes: mmap.mmap  # kept: still there where the relay has deleted its slots


class Publisher:
    """Publishes versions of a model through the relay behind `remote`.

    remote: entered already, speaks WeightSyncRequest and WeightSyncReply.
    epoch: of this trainer; the relay refuses older ones.
    bucket_bytes, publish_s: `weight_sync.bucket_bytes`, `weight_sync.publish_s`.
    """

    def __init__(self, remote: Remote, *, epoch: int, bucket_bytes: int, publish_s: float) -> None:
        self._remote = remote
        self._epoch = epoch
        self._bucket_bytes = bucket_bytes
        self._publish_s = publish_s
        self._maps = Maps(writable=True)
        self._last: _Published | None = None
        self._lock = asyncio.Lock()  # one publication or announcement at a time
        self._thread: asyncio.Future[Any] | None = None  # may outlive the deadline of who started it

    async def publish(self, version: int, model: "torch.nn.Module", lora: LoRAInfo | None = None) -> None:
        """Make the tensors of `model` visible as `version`. They must not change until this returns.
        lora: what they are, where they are adapters.

        Raises PublicationError where the relay refuses it or `publish_s` passes; the old version stays
        visible then, and the next publication may work.
        """
        try:
            async with asyncio.timeout(self._publish_s), self._lock:
                await self._adopt()
                layout = plan(model, self._bucket_bytes)
                path = await self._slot(version, layout.nbytes)
                if path is not None:
                    buffer = self._maps.open(path)
                    manifest = await self._in_thread(_write, layout, model, buffer, version, self._epoch)
                    manifest = msgspec.structs.replace(manifest, lora=lora)
                    await self._commit(_Published(manifest, path, buffer))
        except (TimeoutError, DeadlineExceeded) as error:
            raise PublicationError(
                f"version {version} did not become visible within {self._publish_s:g} s "
                f"(weight_sync.publish_s = {self._publish_s:g}){f': {error}' if str(error) else ''}"
            ) from None

    async def announce_forever(self) -> None:
        """Say again and again what was published last, and serve it to a relay that has lost it."""
        trouble = ""
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            try:
                async with self._lock, asyncio.timeout(ANNOUNCE_DEADLINE_S):
                    if not await self._adopt():
                        await self._serve_again()
                trouble = ""
            except (TimeoutError, AsyncRLError) as error:  # `publish` raises what matters; here it is news
                news = str(error) or f"no answer within {ANNOUNCE_DEADLINE_S:g} s"
                if news != trouble:
                    log.warning("weight_sync was not told of the newest version: %s", news)
                trouble = news

    async def _adopt(self) -> bool:
        """Announce the last version; False where the relay has not got it and cannot find it in its slot.

        Comes before every Offer too: a relay started anew must know the slot before it gives one away.
        """
        if self._last is None:
            return True
        reply = await self._ask(Commit(self._last.manifest, self._last.path))
        return isinstance(reply, Visible)

    async def _serve_again(self) -> None:
        """Write the last version into a slot of the relay, from the map that this process still holds."""
        last = self._last
        assert last is not None
        if await self._in_thread(check_buckets, last.manifest, last.bytes):
            self._last = None
            raise PublicationError(f"version {last.manifest.version} is overwritten; the next is served")
        path = await self._slot(last.manifest.version, last.manifest.nbytes)
        if path is None:
            return
        self._maps.forget(path)  # where it is the old path, it may be the old file no more
        buffer = self._maps.open(path)
        await self._in_thread(_copy, last.bytes, buffer, last.manifest.nbytes)
        await self._commit(_Published(last.manifest, path, buffer))

    async def _slot(self, version: int, nbytes: int) -> str | None:
        """Where to write `version`; None where it is visible already."""
        match await self._ask(Offer(version, self._epoch, nbytes)):
            case Slot(have=True):
                return None
            case Slot(path=path):
                return path
            case Rejected(reason=reason):
                raise PublicationError(f"version {version}: {reason}")
            case reply:
                raise PublicationError(f"version {version}: weight_sync answered {type(reply).__name__}")

    async def _commit(self, written: _Published) -> None:
        match await self._ask(Commit(written.manifest, written.path)):
            case Visible():
                self._last = written
            case Rejected(reason=reason):
                raise PublicationError(f"version {written.manifest.version}: {reason}")
            case reply:
                raise PublicationError(f"weight_sync answered {type(reply).__name__}")

    async def _ask(self, message: Offer | Commit) -> object:
        return await self._remote.ask(message, wait_s=self._publish_s)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, after the one before it has ended: two never write to the same map."""
        if self._thread is not None:
            await asyncio.wait({self._thread})
        thread = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        self._thread = thread
        return await asyncio.shield(thread)


def _write(layout: Layout, model: "torch.nn.Module", buffer: mmap.mmap, version: int, epoch: int) -> Manifest:
    """Copy each tensor to its place; torch and xxhash release the interpreter's lock meanwhile."""
    import torch

    tensors = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for entry in layout.tensors:
            if entry.nbytes:
                source = tensors[entry.name].detach()
                count = source.numel()
                flat = torch.frombuffer(buffer, dtype=source.dtype, count=count, offset=entry.offset)
                flat.view(source.shape).copy_(source)
    for offset, nbytes in gaps(layout.tensors):
        buffer[offset : offset + nbytes] = bytes(nbytes)
    return seal(layout, buffer, version=version, epoch=epoch)


def _copy(source: mmap.mmap, target: mmap.mmap, nbytes: int) -> None:
    with memoryview(source) as old, memoryview(target) as new:
        new[:nbytes] = old[:nbytes]
