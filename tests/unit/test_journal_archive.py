"""The journal read while a run goes on, and after it."""

import asyncio
import time
from pathlib import Path

import pytest

from async_rl.buffers import events
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import new_state
from async_rl.errors import JournalDamaged, UserError
from tests.unit.buffer_material import plain
from tests.unit.journal_material import RULES, commands, limits, same, write


def test_the_events_lead_from_the_first_state_to_the_last(tmp_path: Path) -> None:
    began = time.time()
    played = write(tmp_path, steps=4, segment_bytes=8000)
    archive = Archive(tmp_path)
    state = archive.first_state()
    assert plain(state) == plain(new_state(RULES))
    times = []
    for at, event in archive.events():
        times.append(at)
        state.apply(event)
    assert plain(state) == plain(archive.state()) == played.last
    assert began <= times[0] and times == sorted(times) and times[-1] <= time.time()


def test_events_are_one_sequence_over_all_openings(tmp_path: Path) -> None:
    happened = [event for steps in (2, 1, 3) for event in write(tmp_path, steps=steps).happened]
    assert [event for _, event in Archive(tmp_path).events()] == happened


def test_each_draw_can_be_had_with_its_trajectories(tmp_path: Path) -> None:
    played = write(tmp_path, steps=5, segment_bytes=8000)
    archive = Archive(tmp_path)
    draws = archive.draws()
    assert list(draws) == [0, 1, 2, 3, 4]
    drawn = {event.step: event for event in played.happened if isinstance(event, events.Drawn)}
    for step, place in draws.items():
        draw = archive.get_draw(place)
        assert (draw.step, [group.group for group in draw.groups]) == (step, drawn[step].groups)
        for group in draw.groups:
            for member in group.members:
                assert same(archive.get(member.place), played.trajectories[member.place])


def test_where_only_what_checkpoints_need_is_kept_the_draws_are_those_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, steps=12, checkpoints=True, keep="checkpoint", segment_bytes=6000)
    archive = Archive(tmp_path)
    draws = archive.draws()
    assert set(archive.state().draws) <= set(draws) and 0 not in draws and 11 in draws
    for place in draws.values():
        for group in archive.get_draw(place).groups:
            for member in group.members:
                archive.get(member.place)
    state = archive.first_state()
    for _, event in archive.events():
        state.apply(event)
    assert plain(state) == plain(archive.state())


def test_a_live_run_is_read_at_any_moment(tmp_path: Path) -> None:
    async def live() -> None:
        journal, state = DiskJournal.open(tmp_path, RULES, limits(segment_bytes=8000))
        machine = Machine(RULES, state, store=journal)
        archive = Archive(tmp_path)
        for _ in commands(machine, 4):
            happened = machine.take()
            writing = asyncio.create_task(journal.append(happened))
            await asyncio.sleep(0)
            archive.state()  # of some moment
            await writing
            assert plain(archive.state()) == plain(state)
        known = list(archive.events())
        await journal.close()
        assert list(archive.events()) == known

    asyncio.run(live())


def test_no_journal_is_one_line_of_the_user(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no journal is there; .*journal\.enabled = false"):
            Archive(folder)


def test_a_segment_deleted_meanwhile_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    archive = Archive(tmp_path)
    (tmp_path / "00000001.log").unlink()
    with pytest.raises(JournalDamaged, match=r'00000001.log: is gone; journal.keep = "checkpoint" deletes'):
        list(archive.events())


def test_a_newer_kind_of_event_is_said_to_be_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(events, "Any", events.Admitted | events.Leased)
    with pytest.raises(JournalDamaged, match="is of another version of async-rl"):
        Archive(tmp_path).state()
