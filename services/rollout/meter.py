"""The worker's own counts. Time comes in as an argument."""

from async_rl.protocol.buffer import WorkerStats


class Meter:
    def __init__(self, now: float) -> None:
        self._born = now
        self._in_flight = 0
        self._since = now  # when the first of those in flight began
        self._busy_s = 0.0
        self._paused_s = 0.0
        self._tokens = self._finished = self._updates = 0

    @property
    def in_flight(self) -> int:
        """Trajectories being sampled."""
        return self._in_flight

    def begin(self, now: float) -> None:
        if not self._in_flight:
            self._since = now
        self._in_flight += 1

    def end(self, now: float) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += now - self._since

    def finished(self, tokens: int) -> None:
        self._finished += 1
        self._tokens += tokens

    def updated(self, paused_s: float) -> None:
        self._updates += 1
        self._paused_s += paused_s

    def stats(self, now: float) -> WorkerStats:
        return WorkerStats(
            up_s=now - self._born,
            busy_s=self._busy_s + (now - self._since if self._in_flight else 0.0),
            tokens=self._tokens,
            finished=self._finished,
            updates=self._updates,
            paused_s=self._paused_s,
        )
