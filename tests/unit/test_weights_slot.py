"""Slots: files that are reused, never shared between runs, and gone at the end."""

from pathlib import Path

import pytest

from async_rl.errors import PublicationError
from async_rl.weights.slot import Maps, Slots


@pytest.fixture
def slots(tmp_path):
    (tmp_path / "shm").mkdir()
    return Slots(str(tmp_path / "shm"), tmp_path / "runs" / "a")


def test_two_runs_never_have_a_path_in_common(tmp_path):
    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run", Path("run")]
    assert len({Slots("/dev/shm", run).path(0) for run in runs}) == 3


def test_a_path_is_recognised_only_as_its_own(slots):
    assert slots.index(slots.path(2)) == 2
    for path in (
        "/etc/passwd",
        slots.path(2) + "x",
        slots.path(2) + "/../x",
        slots.path(0)[:-1],
        slots.path(0)[:-1] + "00",
    ):
        assert slots.index(path) is None


def test_a_slot_that_fits_is_used_again_and_a_smaller_one_is_replaced(slots):
    path = Path(slots.allocate(0, 8192, fresh=False))
    with path.open("rb") as held:
        inode = path.stat().st_ino
        slots.allocate(0, 4096, fresh=False)
        assert path.stat().st_ino == inode
        slots.allocate(0, 65536, fresh=False)
        assert path.stat().st_ino != inode
        assert path.stat().st_size == 65536
        assert not held.closed  # an open file keeps its inode from being given to another


def test_a_fresh_slot_is_another_file_so_an_old_writer_harms_nobody(slots):
    writer, reader = Maps(writable=True), Maps(writable=False)
    old = writer.open(slots.allocate(1, 4096, fresh=False))
    new = reader.open(slots.allocate(1, 4096, fresh=True))
    old[:3] = b"old"
    assert new[:3] == b"\0\0\0"


def test_a_map_is_kept_while_the_file_is_the_same(slots):
    maps = Maps(writable=False)
    path = slots.allocate(0, 4096, fresh=False)
    first = maps.open(path)
    assert maps.open(path) is first
    slots.allocate(0, 4096, fresh=True)
    assert maps.open(path) is not first
    assert first[:1] == b"\0"  # a view of the old one stays readable


def test_a_reader_sees_what_is_written_but_its_own_writes_stay_its_own(slots):
    path = slots.allocate(0, 4096, fresh=False)
    writer, reader = Maps(writable=True).open(path), Maps(writable=False).open(path)
    writer[0] = 7
    assert reader[0] == 7
    reader[1] = 9
    assert writer[1] == 0


def test_a_slot_that_is_gone_or_a_link_is_one_clear_line(slots):
    with pytest.raises(PublicationError, match="No such file"):
        Maps(writable=False).open(slots.path(0))
    Path(slots.path(1)).symlink_to("/etc/passwd")
    with pytest.raises(PublicationError, match="symbolic link"):
        Maps(writable=False).open(slots.path(1))
    assert not Path(slots.allocate(1, 4096, fresh=False)).is_symlink()


def test_no_room_names_the_setting_and_leaves_nothing_behind(slots):
    with pytest.raises(PublicationError, match=r"weight_sync.directory = .*99999999999999 bytes"):
        slots.allocate(0, 99_999_999_999_999, fresh=False)
    assert not Path(slots.path(0)).exists()


def test_a_missing_directory_names_the_setting(tmp_path):
    with pytest.raises(PublicationError, match=r"weight_sync.directory = .*No such file"):
        Slots(str(tmp_path / "none"), tmp_path).allocate(0, 1, fresh=False)


def test_removal_takes_every_slot_of_this_run_and_no_other(slots, tmp_path):
    other = Slots(str(slots.directory), tmp_path / "runs" / "b")
    kept = other.allocate(0, 4096, fresh=False)
    for index in (0, 1, 7):
        slots.allocate(index, 4096, fresh=False)
    assert slots.remove() == 3
    assert list(slots.directory.iterdir()) == [Path(kept)]
