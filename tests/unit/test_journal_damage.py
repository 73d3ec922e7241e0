"""Damage to the journal: a clear line, never a wrong state, and no single damage costs an event."""

import random
from pathlib import Path

import pytest

from async_rl.buffers.journal import record
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.record import Kind
from async_rl.errors import JournalDamaged
from tests.unit.buffer_material import plain
from tests.unit.journal_material import flip, read, records, reopened, same, write


def test_cut_off_at_any_byte_it_holds_what_was_acknowledged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Field report 11."""
    played = write(tmp_path / "whole")
    data = (tmp_path / "whole" / "00000001.log").read_bytes()
    acknowledged, written = ends(tmp_path / "whole" / "00000001.log")
    folder = tmp_path / "cut"
    folder.mkdir()
    for cut in range(acknowledged[-5], len(data)):
        (folder / "00000001.log").write_bytes(data[:cut])
        state = read(folder)
        batches = played.states.index(state)
        assert sum(end <= cut for end in acknowledged) <= batches == sum(end <= cut for end in written)
        if cut % 97 == 0:
            caplog.clear()
            assert plain(reopened(folder)) == state
            told = [entry.getMessage() for entry in caplog.records if "never finished" in entry.getMessage()]
            assert len(told) == (cut not in (*written, *acknowledged))
            assert read(folder) == state
            (folder / "00000002.log").unlink()


def ends(path: Path) -> tuple[list[int], list[int]]:
    """Of each batch: where its last byte lies, and where the first copy of its events ends."""
    found = records(path, Kind.EVENTS)
    return [one.end for one in found[1::2]], [one.end for one in found[::2]]


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_costs_no_event_and_is_found_where_a_trajectory_is_read(tmp_path: Path, seed: int) -> None:
    played = write(tmp_path, steps=3, segment_bytes=8000)
    assert len(played.segments) > 1
    dice = random.Random(seed)
    for _ in range(60):
        path = tmp_path / f"{dice.choice(played.segments):08}.log"
        data = path.read_bytes()
        at, bit = dice.randrange(len(data)), dice.randrange(8)
        flip(path, at, bit)
        archive = Archive(tmp_path)
        assert plain(archive.state()) == played.last, (path, at, bit)
        assert [event for _, event in archive.events()] == played.happened
        for place, trajectory in played.trajectories.items():
            if place.segment == int(path.stem) and place.offset <= at < place.offset + place.nbytes:
                where = f"{path}: bytes {place.offset} to {place.offset + place.nbytes} are not those that were written"
                with pytest.raises(JournalDamaged, match=where):
                    archive.get(place)
            else:
                assert same(archive.get(place), trajectory)
        archive.close()
        path.write_bytes(data)


def test_many_damages_give_the_state_of_some_moment_or_a_clear_line(tmp_path: Path) -> None:
    """All that can be lost without a word is what looks like an unfinished write, at the very end."""
    played = write(tmp_path, steps=3, segment_bytes=8000)
    dice, refused = random.Random(5), 0
    for _ in range(150):
        path = tmp_path / f"{dice.choice((dice.choice(played.segments), played.segments[-1])):08}.log"
        data = path.read_bytes()
        last = records(path, Kind.EVENTS, Kind.SNAPSHOT)[-1]
        broken, start = bytearray(data), dice.randrange(len(data))
        stop = min(len(data), start + dice.choice((50, 500, 5000)))
        broken[start:stop] = dice.choice((bytes(stop - start), dice.randbytes(stop - start)))
        path.write_bytes(broken)
        try:
            state = read(tmp_path)
        except JournalDamaged as error:
            assert "\n" not in str(error) and str(path.parent) in str(error)
            refused += 1
        else:
            at_the_end = path.stem == f"{played.segments[-1]:08}" and stop > last.start
            assert state == played.last or (at_the_end and state in played.states)
        path.write_bytes(data)
    assert refused > 2


def test_both_copies_of_a_batch_damaged_are_one_line_that_says_what_is_lost(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "00000001.log"
    found = records(path, Kind.EVENTS)
    _, before, one, two, behind = found[6:11]
    assert (before.number, one.number, two.number, behind.number) == (4, 5, 5, 6)
    flip(path, one.start + 70)
    assert read(tmp_path)
    flip(path, two.start + 70)
    line = (
        f"{path}: bytes {before.end} to {behind.start} are not those that were written; "
        "what happened in batches 5 to 5 cannot be had again"
    )
    with pytest.raises(JournalDamaged, match=line):
        reopened(tmp_path)
    with pytest.raises(JournalDamaged, match=line):
        list(Archive(tmp_path).events())
    assert not (tmp_path / "00000002.log").exists()


def test_without_its_snapshots_a_segment_is_read_on_from_the_one_before(tmp_path: Path) -> None:
    write(tmp_path)
    played = write(tmp_path)
    path = tmp_path / "00000002.log"
    for found in records(path, Kind.SNAPSHOT):
        flip(path, found.start + 80)
    assert not records(path, Kind.SNAPSHOT)
    assert read(tmp_path) == played.last
    assert plain(reopened(tmp_path)) == played.last


def test_no_snapshot_that_is_whole_is_no_state(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "00000001.log"
    for found in records(path, Kind.SNAPSHOT):
        flip(path, found.start)
    with pytest.raises(JournalDamaged, match="no segment begins with a state that can be read"):
        reopened(tmp_path)
    with pytest.raises(JournalDamaged, match="both copies of the state it begins with are damaged"):
        list(Archive(tmp_path).events())


@pytest.mark.parametrize("left", [0, 5000])
def test_a_segment_of_which_nothing_can_be_read_is_not_taken_for_the_end(tmp_path: Path, left: int) -> None:
    played = write(tmp_path, steps=4, segment_bytes=8000)
    for number in played.segments[-2:]:
        path = tmp_path / f"{number:08}.log"
        data = path.read_bytes()
        path.write_bytes(bytes(left))
        if number == played.segments[-1]:
            with pytest.raises(JournalDamaged, match=f"{path}: none of its {left} bytes can be read"):
                read(tmp_path)
        else:
            assert read(tmp_path) == played.last  # the newest begins with the state
        path.write_bytes(data)


def test_a_missing_segment_is_told_by_who_needs_it(tmp_path: Path) -> None:
    played = write(tmp_path, steps=4, segment_bytes=8000)
    assert len(played.segments) >= 3
    (tmp_path / f"{played.segments[1]:08}.log").unlink()
    assert read(tmp_path) == played.last
    with pytest.raises(JournalDamaged, match="the last bytes of the segment before it"):
        list(Archive(tmp_path).events())


def test_a_segment_whose_beginning_was_never_finished_is_none(tmp_path: Path) -> None:
    played = write(tmp_path)
    left = tmp_path / "00000002.new"
    left.write_bytes((tmp_path / "00000001.log").read_bytes()[:300])
    assert read(tmp_path) == played.last
    assert plain(reopened(tmp_path)) == played.last
    assert not left.exists()


def test_a_copy_of_a_segment_under_another_number_is_no_segment(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "00000002.log").write_bytes((tmp_path / "00000001.log").read_bytes())
    with pytest.raises(JournalDamaged, match=r"00000002.log: none of its \d+ bytes can be read"):
        read(tmp_path)


def test_damaged_draws_are_told(tmp_path: Path) -> None:
    write(tmp_path)
    place = Archive(tmp_path).draws()[1]
    flip(tmp_path / "00000001.log", place.offset + record.HEAD + 30)
    archive = Archive(tmp_path)
    archive.get_draw(archive.draws()[0])
    with pytest.raises(JournalDamaged, match=f"00000001.log: bytes {place.offset} to {place.offset + place.nbytes}"):
        archive.get_draw(place)
