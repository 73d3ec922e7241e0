"""The pure state machine of the buffer. No socket, no clock, no thread, no randomness: the service, the tests
and simulations run this same code.

    machine = Machine(settings)
    leases = machine.workers.acquire("rollout-0", "a1", "generate", 32, version=0, now=0.0)
    batch = machine.trainer.draw(step=0, epoch=0)
    await journal.append(machine.take())

Each command is decided by pure functions into events; `State.apply` of them is all that changes anything.
"""

from async_rl.buffers import events
from async_rl.buffers.core import Core
from async_rl.buffers.for_trainer import ForTrainer
from async_rl.buffers.for_workers import ForWorkers
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import State


class Machine(Core):
    """state: what a journal gave back, or None for a new run."""

    def __init__(self, settings: Settings, state: State | None = None) -> None:
        super().__init__(settings, state)
        self.workers = ForWorkers(self)
        self.trainer = ForTrainer(self)

    def close(self, reason: str) -> None:
        """The run is over: what is held becomes dropped(end). Asked again, nothing happens."""
        if self.state.closed is None:
            self.end_held()
            self.record(events.Closed(reason))
            self.state.check()
