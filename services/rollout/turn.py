"""When an engine that shares its device with the trainer is awake. Pure: the worker's doings in, its next move out.

             work: take, then wake                told nothing: sleep
    asleep ----------------------> waking -> awake ------------------> falling -> asleep

Work is a lease that is held, or a newer version that is to be loaded. A worker asks for leases asleep as well as awake,
and it is told nothing when it asked awake without work and got none. So the device is held only while there is
something to do that needs neither the trainer nor another worker: no two wait for each other.
"""

from typing import Literal

Phase = Literal["asleep", "waking", "awake", "falling"]
Move = Literal["take", "wake", "sleep"]


class Turn:
    """It begins awake: the engine has just been built."""

    def __init__(self) -> None:
        self.phase: Phase = "awake"

    def move(self, work: bool) -> Move | None:
        """What to do now. The lock is held in every phase but `asleep`."""
        match self.phase:
            case "asleep":
                return "take" if work else None
            case "waking":
                return "wake"
            case "falling":
                return "sleep"
        return None

    def told_nothing(self, work: bool) -> None:
        """The buffer had nothing for a worker without work; there may be some since."""
        if self.phase == "awake" and not work:
            self.phase = "falling"

    def took(self) -> None:
        """The lock, shared."""
        self._from("asleep", "waking")

    def woke(self) -> None:
        self._from("waking", "awake")

    def slept(self) -> None:
        """The lock may be released."""
        self._from("falling", "asleep")

    def _from(self, before: Phase, after: Phase) -> None:
        assert self.phase == before, f"{after} from {self.phase}"
        self.phase = after
