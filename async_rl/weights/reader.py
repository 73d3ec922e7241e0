"""A rollout's side of a publication: fetch, check, read without a copy, release.

received = await subscriber.fetch(have=self.version, wait_s=10)
if received is not None:
    for name, tensor in received.tensors(): ...
    if not await subscriber.release(received): ...   # taken back while it was read: fetch again
"""

import asyncio
import logging
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from async_rl.actor.remote import Remote
from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Fetch, Manifest, Release, Released, Weights
from async_rl.weights.manifest import aliases_of, check_buckets, check_layout, views
from async_rl.weights.slot import Maps

if TYPE_CHECKING:
    import torch

TRIES = 3  # fetches that may be taken back while their checksums are computed, before `fetch` gives up
log = logging.getLogger(__name__)


class Received:
    """One version of the weights, its checksums verified. Valid until it is released."""

    def __init__(self, manifest: Manifest, ticket: int, path: str, buffer: mmap.mmap) -> None:
        self.manifest = manifest
        self.path = path  # of the slot
        self.version = manifest.version
        self.ticket = ticket
        self._buffer = buffer

    @property
    def aliases(self) -> dict[str, str]:
        """alias -> canonical name, for tensors that share storage (tied embeddings)."""
        return aliases_of(self.manifest)

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(canonical name, tensor on the CPU): views of the slot, to be copied from and not to be kept."""
        return views(self.manifest.tensors, self._buffer)


class Subscriber:
    """Fetches weights from the relay behind `remote` for the worker `worker` of this `incarnation`.

    One version at a time: the next fetch gives the one before it back.
    """

    def __init__(self, remote: Remote, worker: str, incarnation: str) -> None:
        self._remote = remote
        self._worker = worker
        self._incarnation = incarnation
        self._maps = Maps(writable=False)

    async def fetch(self, have: int, wait_s: float) -> Received | None:
        """Weights newer than `have` (-1: any), or None where there are none within `wait_s`.

        Raises PublicationError where the bytes are not what the manifest says although nobody took the slot
        back.
        """
        for _ in range(TRIES):
            request = Fetch(self._worker, self._incarnation, have, wait_s)
            reply = await self._remote.ask(request, wait_s=wait_s)
            if not isinstance(reply, Weights):
                return None
            try:
                return await asyncio.to_thread(self._open, reply)
            except PublicationError as error:
                self._maps.forget(reply.path)
                if await self._release(reply.ticket):
                    raise
                log.info("version %d was taken back: %s; fetching again", reply.manifest.version, error)
        return None

    async def release(self, received: Received) -> bool:
        """Say that reading is over. False: the slot was taken back meanwhile; what was read is void."""
        return await self._release(received.ticket)

    async def _release(self, ticket: int) -> bool:
        reply = await self._remote.ask(Release(self._worker, ticket))
        return isinstance(reply, Released) and reply.valid

    def _open(self, weights: Weights) -> Received:
        """Map the slot and verify it, in a thread: this reads every byte."""
        manifest = weights.manifest
        wrong = check_layout(manifest)
        buffer = self._maps.open(weights.path)
        if not wrong:
            wrong = [f"checksum of bucket {k} is wrong" for k in check_buckets(manifest, buffer)]
        if wrong:
            raise PublicationError(f"version {manifest.version} from weight_sync: {wrong[0]}")
        return Received(manifest, weights.ticket, weights.path, buffer)
