"""The journal: what comes back from it, whole, torn, damaged and full."""

import asyncio
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.buffers import events
from async_rl.buffers.journal import record
from async_rl.buffers.journal.disk import DiskJournal, recover
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import State, new_state
from async_rl.errors import ConfigError, JournalDamaged, JournalFull
from tests.unit.buffer_material import generate, grade, plain, rollout, settings, train

RULES = settings(groups=2, group_size=2, eta=2, held_out=2)
ROOM = 2**30


def played() -> tuple[Machine, list[events.Any]]:
    """A short run: two steps, an evaluation, a lapse, groups under way."""
    machine = Machine(RULES)
    machine.trainer.evaluate(0)
    for step in range(2):
        for lease in rollout(machine, 8, at=step):
            generate(machine, lease, at=step)
        grade(machine)
        train(machine, step)
    rollout(machine, 4, at=2, worker="rollout-1")
    machine.workers.lapse(1000.0)
    rollout(machine, 2, at=2, now=1001.0)
    return machine, machine.take()


def write(folder: Path, happened: list[events.Any], *, at_once: int = 5) -> None:
    async def all_of_it() -> None:
        journal, _ = DiskJournal.open(folder, RULES, ROOM)
        parts = [happened[i : i + at_once] for i in range(0, len(happened), at_once)]
        await asyncio.gather(*[journal.append(part) for part in parts])
        await journal.close()

    asyncio.run(all_of_it())


def reopened(folder: Path, rules: Any = RULES) -> State:
    async def look() -> State:
        journal, state = DiskJournal.open(folder, rules, ROOM)
        await journal.close()
        return state

    return asyncio.run(look())


def written(folder: Path) -> tuple[Path, bytes, list[int], list[Any]]:
    """A journal: its file, the bytes of it, where each record ends, and the state after each event."""
    _, happened = played()
    write(folder, happened)
    data = (folder / "events").read_bytes()
    return folder / "events", data, [found.end for found in record.scan(memoryview(data))], prefixes(happened)


def prefixes(happened: list[events.Any]) -> list[Any]:
    """The state after each number of events."""
    state = new_state(RULES)
    states = [plain(state)]
    for event in happened:
        state.apply(event)
        states.append(plain(state))
    return states


def test_what_was_appended_gives_the_state_again(tmp_path: Path) -> None:
    machine, happened = played()
    write(tmp_path, happened)
    assert plain(reopened(tmp_path)) == plain(machine.state)
    assert plain(reopened(tmp_path)) == plain(machine.state)  # opening it changes nothing


def test_a_recovered_buffer_goes_on_and_grants_nothing_twice(tmp_path: Path) -> None:
    _, happened = played()
    write(tmp_path, happened)
    machine = Machine(RULES, reopened(tmp_path))
    open_leases = set(machine.state.leases)
    assert open_leases
    granted = rollout(machine, 16, at=2, worker="rollout-2")
    assert not {lease.id for lease in granted} & open_leases
    for lease in granted:
        generate(machine, lease, at=2)
    grade(machine)
    train(machine, 2)
    machine.state.check()


def test_a_worker_started_anew_while_the_buffer_was_down_loses_its_old_leases_at_once(tmp_path: Path) -> None:
    _, happened = played()
    write(tmp_path, happened)
    machine = Machine(RULES, reopened(tmp_path))
    old = {lease for lease, held in machine.state.leases.items() if held.worker == "rollout-0"}
    assert old
    machine.workers.acquire("rollout-0", "another", "generate", 8, 2, 0.0)
    assert not old & set(machine.state.leases)


def test_cut_off_at_any_byte_it_holds_what_was_whole(tmp_path: Path) -> None:
    path, data, ends, states = written(tmp_path)
    for cut in range(ends[-4], len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert plain(reopened(tmp_path)) == states[whole - 1]
        assert path.stat().st_size == ends[whole - 1]


def test_a_flipped_byte_is_found_or_costs_the_unfinished_end(tmp_path: Path) -> None:
    path, data, ends, states = written(tmp_path)
    dice = random.Random(7)
    for place in [*dice.sample(range(ends[-2]), 150), *range(ends[-2], len(data), 7)]:
        broken = bytearray(data)
        broken[place] ^= 1 << dice.randrange(8)
        path.write_bytes(broken)
        if place < ends[-2]:
            with pytest.raises(JournalDamaged, match=r"events: bytes \d+ to \d+ are not those that were written"):
                recover(path, RULES)
            assert path.read_bytes() == bytes(broken)
        else:
            assert plain(recover(path, RULES)[0]) == states[-2]


def test_other_settings_are_told_with_their_name(tmp_path: Path) -> None:
    write(tmp_path, played()[1])
    with pytest.raises(ConfigError, match="written with groups = 2, now it is 3"):
        reopened(tmp_path, settings(groups=3, group_size=2, eta=2, held_out=2))


def test_events_that_do_not_follow_from_each_other_are_no_state(tmp_path: Path) -> None:
    _, happened = played()
    write(tmp_path, happened[3:])
    with pytest.raises(JournalDamaged, match="does not follow from those before"):
        reopened(tmp_path)


def test_its_limit_is_named_and_nothing_more_is_acknowledged(tmp_path: Path) -> None:
    async def fill() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, 2000)
        for event in played()[1]:
            await journal.append([event])

    with pytest.raises(JournalFull, match=r"journal\.max_bytes = 2000"):
        asyncio.run(fill())
    assert (tmp_path / "events").stat().st_size <= 2000
    reopened(tmp_path)


def test_a_full_disk_is_one_clear_line_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.errors import JournalFull
from tests.unit.test_journal import RULES, ROOM, played
async def fill():
    journal, _ = DiskJournal.open(pathlib.Path({str(tmp_path)!r}), RULES, ROOM)
    done = 0
    try:
        for event in played()[1]:
            await journal.append([event])
            done += 1
    except JournalFull as error:
        print(done, error)
asyncio.run(fill())
"""
    limit = 3000
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    done, line = result.stdout.split(maxsplit=1)
    assert "cannot be written after" in line
    assert int(done) > 0
    assert plain(reopened(tmp_path)) == prefixes(played()[1])[int(done)]
