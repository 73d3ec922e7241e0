"""The pure state machine of the buffer. No socket, no clock, no thread, no randomness: the service, the tests
and simulations run this same code.

    machine = Machine(settings)
    leases = machine.workers.acquire("rollout-0", "a1", "generate", 32, version=0, now=0.0)
    batch = machine.trainer.draw(step=0, epoch=0)
    await journal.append(machine.take())

Each command is decided by pure functions into events; `State.apply` of them is all that changes anything.
"""

from collections.abc import Callable

from async_rl.buffers import events
from async_rl.buffers.core import Core
from async_rl.buffers.for_trainer import ForTrainer
from async_rl.buffers.for_workers import ForWorkers
from async_rl.buffers.roster import Roster
from async_rl.buffers.settings import Settings, require_continuable
from async_rl.buffers.state import State, new_state
from async_rl.buffers.store import MemoryStore, Store
from async_rl.trajectory import Task


def _numbered(position: int) -> Task:
    return Task(position, "")


class Machine(Core):
    """state: what a journal gave back, under the settings that it has; None for a new run under `settings`.

    store, task_of: by default those of a simulation, in memory and without tasks.
    """

    def __init__(
        self,
        settings: Settings,
        state: State | None = None,
        *,
        store: Store | None = None,
        task_of: Callable[[int], Task] = _numbered,
    ) -> None:
        state = new_state(settings) if state is None else state
        super().__init__(state, MemoryStore() if store is None else store, task_of)
        self.workers = ForWorkers(self)
        self.trainer = ForTrainer(self)

    def close(self, reason: str) -> None:
        """The run is over: what is held becomes dropped(end). Asked again, nothing happens."""
        state = self.state
        if state.closed is None:
            left = [state.training.groups[number].position for number in sorted(state.training.groups)]
            left += state.again
            self.end_held()
            self.record(events.Closed(reason, left))
            state.check()

    def go_on(self, settings: Settings, *, complete: bool) -> None:
        """What a journal gave back goes on under `settings`; ConfigError where those make it another run.

        complete: the run has its summary. One that is not and was closed or broken all the same is opened again.
        """
        state = self.state
        if settings != state.settings:
            require_continuable(state.settings, settings)
            self.record(events.SettingsChanged(settings))
            self.roster = Roster(settings.lease_s, settings.lease_max_s)
            if settings.eta != state.eta:
                self.record(events.EtaChanged(settings.eta))
        if not complete and (state.closed is not None or state.broken is not None):
            self.record(events.Reopened())
        for pool in (state.training, state.held_out):
            self.lose_damaged([group for group in pool.groups.values() if group.phase != "drawn"])
        state.check()
