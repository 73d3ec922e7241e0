"""No room for the journal: one line that names what is full, and what was acknowledged stays."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.buffers import events
from async_rl.buffers.group import Outline
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.machine import Machine
from async_rl.errors import JournalFull
from async_rl.protocol.buffer import LeaseId
from tests.unit.buffer_material import plain, rollout, settings
from tests.unit.journal_material import RULES, limits, long_trajectory, reopened, same, write

MEMBERS = 1000
ONE_GROUP = settings(groups=1, group_size=MEMBERS)
DISK = 2**20


def fill(folder: Path) -> tuple[int, str]:
    """Samples of 20 KB until there is no more room: how many were acknowledged, and what was said then."""

    async def until_full() -> tuple[int, str]:
        journal, state = DiskJournal.open(folder, ONE_GROUP, limits(cache_bytes=0, segment_bytes=200_000))
        machine = Machine(ONE_GROUP, state, store=journal)
        assert rollout(machine, MEMBERS, at=0)
        await journal.append(machine.take())
        trajectory = long_trajectory()
        for member in range(MEMBERS):
            place = journal.put(0, member, trajectory)
            machine.record(events.Generated(LeaseId(0, 0, "generate"), member, Outline(0, 0, 1, False, place)))
            try:
                await journal.append(machine.take())
            except JournalFull as error:
                with pytest.raises(JournalFull):
                    await journal.append([events.EpochRaised(1)])
                with pytest.raises(JournalFull):
                    await journal.close()
                return member, str(error)
        raise AssertionError("it was never full")

    return asyncio.run(until_full())


def fill_under_a_limit(folder: Path, nbytes: int) -> tuple[int, str]:
    """The same in a process of its own whose files may have `nbytes`."""
    script = (
        "import json, pathlib, sys; from tests.unit.test_journal_full import fill; "
        "print(json.dumps(fill(pathlib.Path(sys.argv[1]))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes)),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    done, line = json.loads(result.stdout)
    return done, line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 1 MB; None where this process may mount none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", folder], timeout=20, check=True)


def assert_acknowledged_is_there(folder: Path, acknowledged: int) -> None:
    archive = Archive(folder)
    held = archive.state().training.groups[0].trajectories
    assert len(held) >= acknowledged > 0
    for member in range(acknowledged):
        assert same(archive.get(held[member].place), long_trajectory())
    archive.close()


def test_a_full_disk_is_one_clear_line_and_what_was_acknowledged_stays(tmp_path: Path, small_disk: Path | None) -> None:
    if small_disk is None:
        done, line = fill_under_a_limit(tmp_path, 150_000)
        assert_acknowledged_is_there(tmp_path, done)
        return
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    done, line = fill(small_disk / "journal")
    assert line.endswith(": No space left on device") and "cannot be written" in line and "\n" not in line
    assert len(Archive(small_disk / "journal").draws()) == 0
    assert_acknowledged_is_there(small_disk / "journal", done)
    with pytest.raises(JournalFull, match="No space left on device"):
        reopened(small_disk / "journal", ONE_GROUP)
    assert_acknowledged_is_there(small_disk / "journal", done)
    ballast.unlink()  # room again: it goes on
    assert len(reopened(small_disk / "journal", ONE_GROUP).training.groups[0].trajectories) >= done
    assert_acknowledged_is_there(small_disk / "journal", done)


def test_a_file_that_may_not_grow_is_one_clear_line_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    done, line = fill_under_a_limit(tmp_path, 150_000)
    assert "00000001.log: cannot be written, after" in line and line.endswith(": File too large")
    assert_acknowledged_is_there(tmp_path, done)
    assert len(reopened(tmp_path, ONE_GROUP).training.groups[0].trajectories) >= done


def test_its_limit_is_named_and_counts_all_segments(tmp_path: Path) -> None:
    with pytest.raises(JournalFull, match=r"journal's \d+ exceed journal\.max_bytes = 30000"):
        for _ in range(100):
            write(tmp_path, max_bytes=30_000, segment_bytes=6000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30_000
    state = plain(Archive(tmp_path).state())
    assert plain(reopened(tmp_path)) == state  # with more room it goes on


def test_what_checkpoints_no_longer_need_makes_room(tmp_path: Path) -> None:
    played = write(tmp_path, steps=40, checkpoints=True, keep="checkpoint", segment_bytes=6000, max_bytes=200_000)
    assert plain(Archive(tmp_path).state()) == played.last
    with pytest.raises(JournalFull):
        write(tmp_path / "all", steps=40, checkpoints=True, segment_bytes=6000, max_bytes=200_000)


def test_no_room_for_the_first_state_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(JournalFull, match=r"journal\.max_bytes = 100"):
        DiskJournal.open(tmp_path, RULES, limits(max_bytes=100))
