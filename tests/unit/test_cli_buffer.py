"""What `async-rl buffer` reads of a journal."""

from pathlib import Path

import numpy as np
import pytest

from async_rl.buffers import inspect
from async_rl.buffers.history import history, members
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.record import Kind
from async_rl.cli.buffer import buffer, shown
from async_rl.errors import JournalDamaged, UserError
from async_rl.trajectory import Trajectory
from tests.unit.buffer_material import plain
from tests.unit.journal_material import flip, read, records, write


def lines(folder: Path) -> list[str]:
    seen = inspect.follow(Archive(folder))
    return list(inspect.overview(seen, seen.latest))


def test_what_is_followed_is_the_state_with_the_times_of_what_is_held(tmp_path: Path) -> None:
    write(tmp_path, steps=3)
    seen = inspect.follow(Archive(tmp_path))
    assert plain(seen.state) == read(tmp_path)
    assert seen.begins is not None
    assert all(seen.begins <= seen.admitted_at(number) <= seen.latest for number in seen.state.training.groups)
    assert all(seen.begins <= seen.granted_at(lease) <= seen.latest for lease in seen.state.leases)


def test_the_overview_conserves_and_names_every_held_group_oldest_first(tmp_path: Path) -> None:
    write(tmp_path, steps=3)
    state = inspect.follow(Archive(tmp_path)).state
    found = lines(tmp_path)
    assert found[0].startswith("version 3 of 100, eta 2")
    assert found[1].startswith(f"admitted {state.admitted} = trained {state.trained} + dropped")
    header = next(number for number, line in enumerate(found) if line.startswith("group  task"))
    rows = [int(line.split()[0]) for line in found[header + 1 :]]
    assert rows == sorted(state.training.groups)
    assert state.leases
    assert "held by rollout-0" in next(line for line in found if line.startswith("oldest lease: "))


def test_of_many_groups_fifty_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, steps=1)
    held = len(inspect.follow(Archive(tmp_path)).state.training.groups)
    assert held > 1
    monkeypatch.setattr(inspect.report, "ROWS", 1)
    assert lines(tmp_path)[-1] == f"... and {held - 1} more"


def test_a_whole_journal_has_no_damage_and_an_unfinished_write_is_none(tmp_path: Path) -> None:
    write(tmp_path)
    (path,) = tmp_path.glob("*.log")
    size = path.stat().st_size
    assert list(inspect.files(tmp_path)) == [f"journal: {size:,} bytes in 1 segment ({tmp_path})", "damaged: nothing"]
    with path.open("ab") as file:
        file.write(b"half a record")
    assert f"unfinished: {path}: bytes {size} to {size + 13}" in list(inspect.files(tmp_path))[1]


def test_damage_is_named_by_what_it_costs(tmp_path: Path) -> None:
    write(tmp_path)
    (path,) = tmp_path.glob("*.log")
    for kind, text in (
        (Kind.TRAJECTORY, "the trajectory of group 0, member 0"),
        (Kind.DRAW, "the draw of step 0"),
        (Kind.EVENTS, "a copy of what happened"),
        (Kind.SNAPSHOT, "a copy of what happened"),
    ):
        first = [one for one in records(path, kind) if kind != Kind.TRAJECTORY or one.number > 0]
        where = _of_training(tmp_path) if kind == Kind.TRAJECTORY else (first[0].start, first[0].end)
        flip(path, where[1] - 1)
        found = [line for line in inspect.files(tmp_path) if line.startswith("damaged: ")]
        assert len(found) == 1
        assert f"bytes {where[0]} to {where[1]}: {text}" in found[0]
        flip(path, where[1] - 1)


def test_what_cannot_be_read_any_further_is_located_before_it_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "journal")
    (path,) = (tmp_path / "journal").glob("*.log")
    both = [one for one in records(path, Kind.EVENTS) if one.number == 3]
    for one in both:
        flip(path, one.end - 1)
    with pytest.raises(JournalDamaged, match="batches 3 to 3 cannot be had again"):
        buffer(str(tmp_path), group=None, member=None)
    assert f"damaged: {path}: bytes {both[0].start} to {both[1].end}: " in capsys.readouterr().out


def _of_training(folder: Path) -> tuple[int, int]:
    place = history(Archive(folder), 0).members[0].place
    return place.offset, place.offset + place.nbytes


def test_a_groups_history_tells_its_life_and_its_members(tmp_path: Path) -> None:
    write(tmp_path, steps=2)
    archive = Archive(tmp_path)
    number = archive.get_draw(archive.draws()[1]).groups[0].group
    found = history(archive, number)
    assert archive.state().find(number) is None  # held no more
    told = [line[25:] for line in found.lines]
    assert told[0].startswith("admitted: task")
    assert told[1].startswith("leased to rollout-0 to generate members [0, 1], attempt 0")
    assert told[-2:] == ["drawn for step 1, trainer 0", "trained in step 1"]
    assert found.drawn is not None
    assert len(list(members(archive, found))) == 2


def test_a_group_is_found_where_the_journal_begins_after_it(tmp_path: Path) -> None:
    write(tmp_path, steps=6, checkpoints=True, keep="checkpoint", segment_bytes=2000)
    archive = Archive(tmp_path)
    begun = {group for group in range(archive.state().admitted) if archive.first_state().find(group)}
    assert begun
    for number in sorted(begun):
        assert "the journal begins later" in history(archive, number).lines[0]
    for place in archive.draws().values():
        for group in archive.get_draw(place).groups:
            assert sorted(history(archive, group.group).members) == [m.member for m in group.members]
    with pytest.raises(UserError, match="group 5000: nothing"):
        history(archive, 5000)


def test_a_trajectory_is_readable_as_text_with_and_without_a_tokenizer() -> None:
    action = np.array([False, False, True, True])
    trajectory = Trajectory(
        tokens=np.array([7, 8, 9, 2], dtype=np.int32),
        action=action,
        logprobs=np.where(action, -0.25, 0.0).astype(np.float32),
        versions=[(3, 1), (4, 1)],
        stop="eos",
        text="c",
    )
    bare = list(shown(trajectory, None))
    assert bare[0] == "prompt: [7, 8]"
    assert bare[1] == "completion: 'c', ended by eos"
    assert [line.split() for line in bare[3:]] == [
        ["0", "7", "no", "-", "-"],
        ["1", "8", "no", "-", "-"],
        ["2", "9", "yes", "3", "-0.2500"],
        ["3", "2", "yes", "4", "-0.2500"],
    ]
    decoded = list(shown(trajectory, lambda ids: "".join("abcd"[token % 7] for token in ids)))
    assert decoded[0] == "prompt: 'ab'"
    assert decoded[-1].endswith("'c'")
