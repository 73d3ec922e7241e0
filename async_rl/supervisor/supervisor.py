"""The loop of `async-rl train`: start, watch, restart, stop.

It waits for three things at once: a process that ends, a signal, and the next tick of the live line. The run
is over when the trainer ends with status 0; any fatal end stops every other service and is the last word.
"""

import asyncio
import signal
from collections import Counter
from pathlib import Path

from async_rl.config.schema import Config
from async_rl.errors import Interrupted, ServiceFailed, UserError
from async_rl.rundir import RunDir
from async_rl.supervisor.children import Child, last_error, stop_in_order, wait_for
from async_rl.supervisor.report import LiveLine
from async_rl.supervisor.roster import Role, roster
from async_rl.supervisor.verdict import USER_STATUS, verdict
from async_rl.weights.slot import Slots

STEADY_S = 60.0  # a worker that lived for so long has not failed "in a row"


class Supervisor:
    def __init__(self, config: Config, run: RunDir, live: LiveLine) -> None:
        self._config = config
        self._run = run
        self._live = live
        self._children: dict[str, Child] = {}
        self._deaths: Counter[str] = Counter()
        self._ends: asyncio.Queue[Child] = asyncio.Queue()
        self._watchers: set[asyncio.Task[None]] = set()
        self._left: list[Role] = []  # who ended in order, since the run was ending
        self.restarts: Counter[str] = Counter()

    async def supervise(self) -> None:
        """Returns when the run is over; raises the error of the service that ended it, or Interrupted."""
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, interrupted.set)
        live = asyncio.create_task(self._live.show(), name="live line")
        try:
            for role in roster(self._config):
                await self._start(role)
            await self._until_over(interrupted)
            await wait_for(self._children.values(), self._config.services.stop_s)
        finally:
            live.cancel()
            await asyncio.wait({live})  # however it ended (a closed terminal, say): the services are stopped
            await stop_in_order(self._children.values(), self._config.services.stop_s)
            for watcher in self._watchers:
                watcher.cancel()
            # A relay that was killed has left its slots behind, and shared memory outlives every process.
            Slots(self._config.weight_sync.directory, self._run.path).remove()

    async def _until_over(self, interrupted: asyncio.Event) -> None:
        signalled = asyncio.create_task(interrupted.wait(), name="signal")
        while True:
            ended = asyncio.create_task(self._ends.get(), name="end of a service")
            await asyncio.wait({signalled, ended}, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                ended.cancel()
                raise Interrupted
            child = ended.result()
            if await self._judge(child):
                signalled.cancel()
                return

    async def _judge(self, child: Child) -> bool:
        """Act on the end of `child`; True when the run is over."""
        role, status = child.role, child.process.returncode or 0
        child.signal(signal.SIGKILL)  # whatever it started and left behind
        if child.lived_s > STEADY_S:
            self._deaths[role.name] = 0
        self._deaths[role.name] += 1
        deaths, limit = self._deaths[role.name], self._config.services.max_failures
        # The trainer writes the summary before it closes the buffer, so whoever ends after that does so in order.
        ending = role.service != "trainer" and self._run.summary.exists()
        match verdict(
            role.service,
            status,
            ending=ending,
            deaths_in_a_row=deaths,
            max_failures=limit,
            journal=self._config.journal.enabled,
        ):
            case "over":
                if not self._run.summary.exists():  # somebody stopped the trainer
                    raise Interrupted
                return True
            case "ignore":
                self._left.append(role)
                return False
            case "restart":
                self.restarts[role.name] += 1
                self._live.say(f"{role.name} ended ({_how(status)}); starting it anew ({deaths} of {limit})")
                await self._start(role)
                if role.service == "trainer":
                    await self._resume_the_end()
                return False
            case _:
                fallback = f"{role.name} ended ({_how(status)}); see {self._run.logs / (role.name + '.log')}"
                error = last_error(self._log_of(role), fallback)
                raise UserError(error) if status == USER_STATUS else ServiceFailed(error)

    async def _resume_the_end(self) -> None:
        """A trainer that died at the very end writes the summary again and closes the run again: it needs those
        who have left meanwhile."""
        self._run.summary.unlink(missing_ok=True)
        left, self._left = self._left, []
        for role in left:
            await self._start(role)

    async def _start(self, role: Role) -> None:
        child = await Child.start(role, self._run.config, self._log_of(role))
        self._children[role.name] = child
        watcher = asyncio.create_task(self._watch(child), name=f"watch {role.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, child: Child) -> None:
        await child.process.wait()
        await self._ends.put(child)

    def _log_of(self, role: Role) -> Path:
        return self._run.logs / f"{role.name}.log"


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and a terminal that closes, unless that is ignored (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
