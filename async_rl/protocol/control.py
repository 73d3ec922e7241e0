"""What every service answers, beside its own messages."""

from async_rl.protocol.base import Message


class GetStatus(Message, frozen=True):
    pass


class Stop(Message, frozen=True):
    """Finish what must be finished, then end. `reason` goes to the log."""

    reason: str


class ServiceStatus(Message, frozen=True):
    """`version`: the policy version this service works with; -1 where it has none yet."""

    service: str  # "rollout-0"
    pid: int
    uptime_s: float
    version: int = -1
    resident_bytes: int = 0  # memory of the process
    refused_frames: int = 0  # malformed messages counted and dropped
    detail: dict[str, float | int | str] = {}


class Done(Message, frozen=True):
    """The request was carried out and there is nothing to say."""


ControlRequest = GetStatus | Stop
ControlReply = ServiceStatus | Done
