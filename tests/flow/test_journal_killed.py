"""A process that writes a journal is killed, over and over: what it said was acknowledged is there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.buffers.journal.archive import Archive

WRITER = """
import asyncio, pathlib, sys
from async_rl.buffers import events
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.machine import Machine
from tests.unit.buffer_material import generate, grade, rollout, train
from tests.unit.journal_material import RULES, limits

async def write() -> None:
    journal, state = DiskJournal.open(
        pathlib.Path(sys.argv[1]), RULES, limits(keep=sys.argv[2], segment_bytes=10_000, cache_bytes=0)
    )
    machine = Machine(RULES, state, store=journal)
    async def settle() -> None:
        await journal.append(machine.take())
    while state.epoch < 10**6:
        async with asyncio.TaskGroup() as tasks:  # they share a commit
            for _ in range(5):
                machine.record(events.EpochRaised(state.epoch + 1))
                journal.put(0, 0, TRAJECTORY)
                tasks.create_task(settle())
        if state.epoch % 25 == 0:
            machine.record(events.Checkpointed(0))
            await settle()
        print(state.epoch, flush=True)

from tests.unit.journal_material import long_trajectory
TRAJECTORY = long_trajectory()
asyncio.run(write())
"""


@pytest.mark.parametrize("keep", ["run", "checkpoint"])
def test_killed_at_any_moment_it_holds_all_that_was_acknowledged(tmp_path: Path, keep: str) -> None:
    folder, dice, before = tmp_path / "journal", random.Random(keep), 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, folder, keep],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        ) as process:
            assert process.stdout is not None
            first = process.stdout.readline()  # it writes
            time.sleep(dice.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            acknowledged = [int(line) for line in (first, *process.stdout)][-1]
        archive = Archive(folder)
        state = archive.state()
        assert before < acknowledged <= state.epoch <= acknowledged + 5
        again = archive.first_state()
        for _, event in archive.events():
            again.apply(event)
        assert again == state
        before = state.epoch
    assert before > 50
    assert len(list(folder.glob("*.log"))) > 6 or keep == "checkpoint"
