"""Trains again from a run's journal: the draws that were, in order, through the same step. No service is started,
no token generated.

It stands above the services: what the buffer wrote, the trainer's step gets.
"""

import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from async_rl.buffers import store
from async_rl.buffers.journal.archive import Archive
from async_rl.config import Config, bounds
from async_rl.errors import AsyncRLError, JournalDamaged, UserError
from async_rl.models.load import trainable
from async_rl.protocol.buffer import Drawn
from async_rl.rundir import RunDir
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.metrics import MetricsFile, StepRecord, step_record
from async_rl.services.trainer.orders import Checksum, LoadVersion, Save, Step
from async_rl.services.trainer.team import Team


class Recorded:
    """The steps whose draws a journal has; those of a run that goes on, up to the last that was committed."""

    def __init__(self, journal: Path) -> None:
        self._archive = Archive(journal)
        state = self._archive.state()
        self.end = state.version
        self._reuse = state.settings.reuse
        self._draws = self._archive.draws()

    @property
    def begin(self) -> int:
        """The first step from which on every draw is there."""
        step = self.end
        while step and self._first(step - 1) is not None:
            step -= 1
        return step

    def drawn(self, step: int) -> Drawn:
        """What the trainer got for `step`; JournalDamaged, with the step, where that cannot be had again."""
        first = self._first(step)
        if first is None:
            raise JournalDamaged(f"step {step} cannot be made again: the journal has its draw no more")
        try:
            draw = self._archive.get_draw(self._draws[first])
            return store.drawn(draw, step, self._archive.get)
        except JournalDamaged as error:
            raise JournalDamaged(f"step {step} cannot be made again: {error}") from None

    def close(self) -> None:
        self._archive.close()

    def _first(self, step: int) -> int | None:
        """The first step of the draw that `step` was trained on."""
        return next((first for first in range(step, step - self._reuse, -1) if first in self._draws), None)


class Start(NamedTuple):
    name: str  # of the weights
    load: LoadVersion


def start(run: RunDir, settings: Config, config: Config, begin: int, out: Path) -> Start:
    """The weights that the steps from `begin` on can be made with: the run's first ones, else those of its oldest
    checkpoint that is young enough. settings: the run's; config: the replay's. UserError without any."""
    first = trainable(config.model, out / "policy")
    theirs = msgspec.to_builtins(settings)
    if begin == 0:
        return Start(settings.model.path, LoadVersion(first, "", -1, theirs))
    checkpoints = Checkpoints(run.checkpoints, settings.trainer.keep_checkpoints)
    version = next((version for version in checkpoints.versions if version >= begin), None)
    if version is None:
        raise UserError(
            f"{run.journal} begins with step {begin}, and no checkpoint in {run.checkpoints} is of version {begin} or "
            "later (journal.keep, trainer.keep_checkpoints)"
        )
    folder = str(run.checkpoints.resolve())
    return Start(str(checkpoints.path(version)), LoadVersion(first, folder, version, theirs))


class Replay:
    """By the ranks of `team`, which has its weights. out: the folder of its metrics."""

    def __init__(self, team: Team, config: Config, out: Path) -> None:
        self.version = team.work.version
        self._team, self._config = team, config
        self._metrics = MetricsFile(out / "metrics.jsonl")
        self._began = time.monotonic()

    def step(self, recorded: Recorded) -> StepRecord:
        """The next one; JournalDamaged where its draw is."""
        asked = time.monotonic()
        drawn = recorded.drawn(self.version)
        began = time.monotonic()
        result = self._team.do(Step(drawn))
        now = time.monotonic()
        record = step_record(
            drawn,
            result,
            on_exceed=bounds(self._config).on_exceed,
            wall_s=now - self._began,
            draw_wait_s=began - asked,
            train_s=now - began,
            held_out=None,
        )
        self._metrics.write(record)
        self.version += 1
        return record

    @property
    def weights(self) -> str:
        """Their checksum."""
        return str(self._team.do(Checksum()))

    def equals(self, checkpoints: Checkpoints) -> bool:
        """Whether the run has a checkpoint of this version; AsyncRLError where its weights are others."""
        if self.version not in checkpoints.versions:
            return False
        theirs, ours = checkpoints.state(self.version).weights, self.weights
        if ours != theirs:
            raise AsyncRLError(
                f"version {self.version}: the weights are not those of {checkpoints.path(self.version)}: "
                f"their checksum is {ours}, there it is {theirs}"
            )
        return True

    def save(self) -> Path:
        """A checkpoint of this version."""
        self._team.do(Save(self.version, None))
        checkpoints = self._team.work.checkpoints
        return checkpoints.finish() or checkpoints.path(self.version)
