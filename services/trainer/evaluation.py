"""Held-out evaluations beside the training: asked for at once, collected in the background."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable

from async_rl.actor.remote import Remote
from async_rl.errors import PeerRefused
from async_rl.protocol.buffer import Evaluate, EvaluationReport, GetEvaluation

POLL_S = 2.0
log = logging.getLogger(__name__)


class Evaluations:
    """`record` is called with each report, in the order in which they come.

    tasks: the group that the collecting tasks belong to; an error in one ends the service.
    wait_s: `evaluation.wait_s`. known: versions whose reports are there already.
    """

    def __init__(
        self,
        buffer: Remote,
        tasks: asyncio.TaskGroup,
        record: Callable[[EvaluationReport], None],
        wait_s: float,
        known: Iterable[int] = (),
    ) -> None:
        self._buffer = buffer
        self._tasks = tasks
        self._record = record
        self._wait_s = wait_s
        self._asked = set(known)
        self._pending: dict[int, asyncio.Task[None]] = {}

    async def start(self, version: int) -> None:
        """Have the held-out tasks scored with exactly the weights of `version`; asked again, nothing happens."""
        if version not in self._asked:
            self._asked.add(version)
            await self._buffer.ask(Evaluate(version))
            self._follow(version, self._collect(version))

    def take_up(self, version: int) -> None:
        """Wait for what an earlier trainer asked for, if it did."""
        if version not in self._asked:
            self._follow(version, self._collect_if_asked(version))

    def _follow(self, version: int, collecting: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(collecting, name=f"evaluation of version {version}")
        self._pending[version] = task
        task.add_done_callback(lambda _: self._pending.pop(version, None))

    async def finish(self) -> None:
        """Wait for what is still out, at most evaluation.wait_s; a report that does not come is given up."""
        if not self._pending:
            return
        await asyncio.wait(self._pending.values(), timeout=self._wait_s)
        for version in list(self._pending):
            log.warning(
                "the evaluation of version %d did not come within %g s (evaluation.wait_s)",
                version,
                self._wait_s,
            )
        self.cancel()

    def cancel(self) -> None:
        for task in list(self._pending.values()):
            task.cancel()

    async def _collect_if_asked(self, version: int) -> None:
        with contextlib.suppress(PeerRefused):
            await self._collect(version)

    async def _collect(self, version: int) -> None:
        while True:
            reply = await self._buffer.ask(GetEvaluation(version, wait_s=POLL_S), wait_s=POLL_S)
            if isinstance(reply, EvaluationReport):
                self._record(reply)
                return
