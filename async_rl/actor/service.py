"""The life of a service process: address, mailbox, work, ordered stop. One lifecycle for all five.

class Rollout(Service):
    kind = "rollout"
    requests, replies = ControlRequest, ControlReply
    async def work(self): ...          # returns when the service has nothing more to do

run_service(Rollout(config, "rollout-0"))   # returns the exit status
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import uvloop

from async_rl.actor.mailbox import Mailbox
from async_rl.actor.remote import Remote
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, InvariantError
from async_rl.protocol.control import Done, GetStatus, ServiceStatus, Stop
from async_rl.rundir import RunDir

log = logging.getLogger(__name__)


class Service(ABC):
    """One actor. Subclasses give `kind`, the unions of their messages, `work`, and `handle` for their own."""

    kind: ClassVar[str]
    requests: ClassVar[Any]
    replies: ClassVar[Any]

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.run = RunDir.of(config)
        self.stopping = asyncio.Event()  # an ordered stop was asked for; `work` returns soon after
        self.version = -1
        self._mailbox: Mailbox | None = None
        self._born = time.monotonic()

    @abstractmethod
    async def work(self) -> None:
        """The service's own loop; the service ends when it returns. Watches `self.stopping`."""

    async def handle(self, request: Any) -> Any:
        """The reply to a request of the service's own; an AsyncRLError goes back to the asker."""
        raise AsyncRLError(f"{self.name} has no answer to {type(request).__name__}")

    def detail(self) -> dict[str, float | int | str]:
        """Figures for `GetStatus`."""
        return {}

    @property
    def incarnation(self) -> str:
        """A random id of this process."""
        assert self._mailbox is not None
        return self._mailbox.incarnation

    def remote(
        self, service: str, requests: Any, replies: Any, *, name: Callable[[], str | None] | None = None
    ) -> Remote:
        """A connection to another service of this run, wherever it announces itself.

        name: which of several of its kind; None while that is not known.
        """
        times = self.config.services

        def address() -> str | None:
            chosen = service if name is None else name()
            return None if chosen is None else self._address_of(chosen)

        return Remote(
            service,
            address,
            requests,
            replies,
            sender=self.name,
            connect_s=times.connect_s,
            ask_s=times.ask_s,
            heartbeat_s=times.heartbeat_s,
            run=run_id(self.run),
        )

    async def main(self) -> None:
        """Bind, announce, work; returns when the work is over."""
        self.run.create()
        address = configured_address(self.config, self.kind)
        mailbox = Mailbox(address, self.kind, self.requests, self.replies, self._answer, run=run_id(self.run))
        async with mailbox:
            self._mailbox = mailbox
            self.run.announce(self.name, mailbox.address)
            log.info("%s at %s, pid %d", self.name, mailbox.address, os.getpid())
            try:
                async with asyncio.TaskGroup() as tasks:
                    serving = tasks.create_task(mailbox.serve(), name=f"{self.name} mailbox")
                    working = tasks.create_task(self.work(), name=f"{self.name} work")
                    stop = tasks.create_task(self._watch_stop(working), name=f"{self.name} stop")
                    working.add_done_callback(lambda _: (serving.cancel(), stop.cancel()))
            finally:
                self.run.withdraw(self.name)
        if working.cancelled() and not self.stopping.is_set():
            raise InvariantError(f"the work of {self.name} was cancelled although nobody asked it to stop")

    async def _watch_stop(self, working: "asyncio.Task[None]") -> None:
        """An ordered stop has `services.stop_s`; then the work is cancelled."""
        await self.stopping.wait()
        stop_s = self.config.services.stop_s
        await asyncio.sleep(stop_s)
        log.warning("%s: still working %g s after the stop (services.stop_s); cancelled", self.name, stop_s)
        working.cancel()

    async def _answer(self, request: Any) -> Any:
        match request:
            case GetStatus():
                return ServiceStatus(
                    service=self.name,
                    pid=os.getpid(),
                    uptime_s=time.monotonic() - self._born,
                    version=self.version,
                    resident_bytes=resident_bytes(),
                    refused_frames=self._mailbox.refused_frames if self._mailbox else 0,
                    detail=self.detail(),
                )
            case Stop(reason=reason):
                log.info("%s: asked to stop: %s", self.name, reason)
                self.stopping.set()
                return Done()
            case _:
                return await self.handle(request)

    def _address_of(self, service: str) -> str | None:
        return configured_address(self.config, service) or self.run.address(service)


def configured_address(config: Config, kind: str) -> str:
    """`services.KIND`, or "" where the service takes a free port (workers always do)."""
    singles = {
        "buffer": config.services.buffer,
        "trainer": config.services.trainer,
        "weight_sync": config.services.weight_sync,
    }
    return singles.get(kind, "")


def run_id(run: RunDir) -> str:
    """What the services of one run, and no others, have in common: its folder."""
    return str(run.path.resolve())


def run_service(service: Service) -> int:
    """Run `service` until its work is over; the exit status. An error is the last line of its log.

    0 after an ordered stop or when the work is done, 2 where the user can mend it, 1 for anything else.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    cause: BaseException | None = None
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_over(service, Watchdog(service)))
    except BaseException as error:  # whatever ends a service is said in the last line of its log
        cause = first_cause(error)
    gc.collect()  # what asyncio has to say of forgotten tasks comes before the last line, not after it
    return 0 if cause is None else report_end(service.name, cause)


async def _until_over(service: Service, watchdog: "Watchdog") -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stopping.set)
    waiting = loop.create_task(watchdog.wait(), name=f"{service.name} watchdog")
    try:
        await service.main()
    finally:
        waiting.cancel()
        watchdog.start()


class Watchdog:
    """Ends a process that does not end by itself: a blocked loop or thread heeds no cancellation."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: threading.Timer | None = None

    async def wait(self) -> None:
        """Begin to count at the ordered stop."""
        await self._service.stopping.wait()
        self.start()

    def start(self) -> None:
        """Begin to count, unless begun. Nobody takes this back: a thread that hangs keeps the interpreter from
        ending, long after the service's last word."""
        if self._timer is None:
            self._timer = threading.Timer(2 * self._service.config.services.stop_s, self._bite)
            self._timer.daemon = True
            self._timer.start()

    def _bite(self) -> None:
        name, stop_s = self._service.name, self._service.config.services.stop_s
        log.error("%s: error: not ended %g s after the stop (services.stop_s = %g)", name, 2 * stop_s, stop_s)
        logging.shutdown()
        os._exit(1)


def report_end(name: str, cause: BaseException) -> int:
    """Log why the service ended, in one last line, after the traceback of a defect; the exit status."""
    if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt):
        return 0
    text = " ".join(str(cause).split())
    if isinstance(cause, AsyncRLError) and not isinstance(cause, InvariantError):
        log.error("%s: error: %s", name, text)
        return cause.exit_status
    log.error("%s failed", name, exc_info=cause)
    log.error("%s: error: %s: %s", name, type(cause).__name__, text)
    return 1


def first_cause(error: BaseException) -> BaseException:
    """The first plain exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def resident_bytes() -> int:
    """Memory that this process holds now; where the system has no /proc, the most that it has held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
