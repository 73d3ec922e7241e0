"""The journal on disk: what comes back, what each opening begins, what is kept and cached."""

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

from async_rl.buffers import events
from async_rl.buffers.group import Place
from async_rl.buffers.journal import segment
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.disk import DiskJournal
from async_rl.buffers.journal.record import Kind
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import State
from async_rl.errors import JournalDamaged
from tests.unit.buffer_material import generate, grade, plain, rollout, settings, train
from tests.unit.journal_material import (
    RULES,
    limits,
    long_trajectory,
    read,
    records,
    reopened,
    same,
    write,
)


def test_what_was_appended_gives_the_state_again(tmp_path: Path) -> None:
    played = write(tmp_path)
    assert read(tmp_path) == played.last
    assert plain(reopened(tmp_path)) == played.last
    assert plain(reopened(tmp_path)) == played.last


def test_each_opening_begins_a_segment_and_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "00000001.log").read_bytes()
    played = write(tmp_path, steps=3)
    assert played.segments == [1, 2]
    assert (tmp_path / "00000001.log").read_bytes() == before
    assert read(tmp_path) == played.last


def test_a_recovered_buffer_goes_on_and_grants_nothing_twice(tmp_path: Path) -> None:
    """Field report 10: a restart generates nothing again that was acknowledged, and honours open leases."""
    write(tmp_path)

    async def go_on() -> None:
        journal, state = DiskJournal.open(tmp_path, RULES, limits())
        machine = Machine(RULES, state, store=journal)
        open_leases = set(state.leases)
        had = {group.id: list(group.trajectories) for group in state.training.groups.values()}
        assert open_leases and any(had.values())
        granted = rollout(machine, 16, at=2, worker="rollout-2")
        assert not {lease.id for lease in granted} & open_leases
        for lease in granted:
            assert not set(lease.open) & set(had.get(lease.id.group, ()))
            generate(machine, lease, at=2)
        grade(machine)
        train(machine, 2)
        state.check()
        await journal.append(machine.take())
        await journal.close()

    asyncio.run(go_on())


def test_a_worker_started_anew_while_the_buffer_was_down_loses_its_old_leases_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    machine = Machine(RULES, reopened(tmp_path))
    old = {lease for lease, held in machine.state.leases.items() if held.worker == "rollout-0"}
    assert old
    machine.workers.acquire("rollout-0", "another", "generate", 8, 2, 0.0)
    assert not old & set(machine.state.leases)


def test_the_state_keeps_the_settings_it_was_decided_under(tmp_path: Path) -> None:
    write(tmp_path)
    assert reopened(tmp_path, settings(groups=3)).settings == RULES


def test_events_that_do_not_follow_from_each_other_are_no_state(tmp_path: Path) -> None:
    async def nonsense() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits())
        await journal.append([events.Readied(7)])
        await journal.close()

    asyncio.run(nonsense())
    with pytest.raises(JournalDamaged, match="batch 1 does not follow from those before"):
        reopened(tmp_path)


def test_a_full_segment_is_followed_by_another_and_all_can_be_read(tmp_path: Path) -> None:
    played = write(tmp_path, steps=8, segment_bytes=6000)
    assert len(played.segments) > 3
    assert all((tmp_path / f"{number:08}.log").stat().st_size < 25_000 for number in played.segments)
    archive = Archive(tmp_path)
    assert plain(archive.state()) == played.last
    assert [event for _, event in archive.events()] == played.happened
    assert len({place.segment for place in played.trajectories}) > 3
    for place, trajectory in played.trajectories.items():
        assert same(archive.get(place), trajectory)


def test_a_state_heavier_than_a_segment_does_not_begin_one_with_every_batch(tmp_path: Path) -> None:
    played = write(tmp_path, steps=8, segment_bytes=1)
    assert len(played.segments) < len(played.states) / 2
    assert read(tmp_path) == played.last


def test_keeping_what_checkpoints_need_deletes_the_rest_and_nothing_that_is_named(tmp_path: Path) -> None:
    played = write(tmp_path, steps=12, checkpoints=True, keep="checkpoint", segment_bytes=6000)
    first, *_ = played.segments
    assert first > 1 and played.segments == list(range(first, played.segments[-1] + 1))
    archive = Archive(tmp_path)
    state = archive.state()
    assert plain(state) == played.last
    assert_named_can_be_read(archive, state)
    assert len(state.draws) < 12
    again = write(tmp_path, steps=2, keep="checkpoint")
    assert_named_can_be_read(Archive(tmp_path), Archive(tmp_path).state())
    assert read(tmp_path) == again.last


def assert_named_can_be_read(archive: Archive, state: State) -> None:
    for kept in state.draws.values():
        for group in archive.get_draw(kept.place).groups:
            for member in group.members:
                assert member.place.segment >= kept.lowest
                archive.get(member.place)
    for group in [*state.training.groups.values(), *state.held_out.groups.values()]:
        for outline in group.trajectories.values():
            archive.get(outline.place)


def test_keeping_the_run_deletes_nothing(tmp_path: Path) -> None:
    played = write(tmp_path, steps=8, checkpoints=True, segment_bytes=6000)
    assert played.segments[0] == 1
    assert [event for _, event in Archive(tmp_path).events()] == played.happened


@pytest.mark.parametrize("cache_bytes", [0, 50_000, 2**28])
def test_what_was_put_is_there_at_once_and_later_whatever_the_cache_holds(tmp_path: Path, cache_bytes: int) -> None:
    async def put_and_get() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits(cache_bytes=cache_bytes))
        trajectory, places = long_trajectory(), []
        for _ in range(3):
            for member in range(4):
                places.append(journal.put(0, member, trajectory))
                assert same(journal.get(places[-1]), trajectory)
            writing = asyncio.create_task(journal.append([]))
            await asyncio.sleep(0)
            assert same(journal.get(places[-1]), trajectory)
            await writing
            for place in places:
                assert same(journal.get(place), trajectory)
            cached = [place for place in places if journal.get(place) is trajectory]
            assert sum(place.nbytes for place in cached) == journal.footprint()["cache_bytes"] <= cache_bytes
            assert cached == places[len(places) - len(cached) :]  # the newest
        if not cache_bytes:
            assert not journal.get(places[0]).tokens.flags.writeable
        await journal.close()

    asyncio.run(put_and_get())


def test_what_is_put_during_a_commit_is_there_after_it(tmp_path: Path) -> None:
    async def put_and_get() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits(cache_bytes=0))
        trajectory = long_trajectory()
        journal.put(0, 0, trajectory)
        commit = asyncio.create_task(journal.append([]))
        await asyncio.sleep(0)  # begun
        await asyncio.sleep(0)  # taken
        place = journal.put(0, 1, trajectory)
        await commit
        assert same(journal.get(place), trajectory)
        await journal.close()

    asyncio.run(put_and_get())


def test_a_held_trajectory_keeps_its_segment_until_its_group_ends(tmp_path: Path) -> None:
    async def hold() -> None:
        journal, state = DiskJournal.open(tmp_path, RULES, limits(keep="checkpoint", cache_bytes=0))
        machine = Machine(RULES, state, store=journal)
        (lease,) = rollout(machine, 2, at=0)
        generate(machine, lease, at=0, members=1)
        await journal.append(machine.take())
        held = state.training.groups[0].trajectories[0].place
        for _ in range(3):
            await checkpoint(machine, journal)
        assert segment.Segments(tmp_path).numbers() == [1, 2, 3, 4]
        journal.get(held)
        machine.record(events.Dropped(0, "stale"))
        await checkpoint(machine, journal)
        assert segment.Segments(tmp_path).numbers() == [5]
        await journal.close()

    async def checkpoint(machine: Machine, journal: DiskJournal) -> None:
        machine.trainer.checkpointed(0, 0)
        await journal.append(machine.take())

    asyncio.run(hold())


def test_a_write_that_the_system_cuts_short_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)

    def short(file: int, parts: list[bytes]) -> int:
        whole = b"".join(parts)
        return os.write(file, whole[: dice.randint(1, 3000)])

    monkeypatch.setattr(segment.os, "writev", short)
    played = write(tmp_path, segment_bytes=8000)
    assert read(tmp_path) == played.last
    archive = Archive(tmp_path)
    assert all(same(archive.get(place), trajectory) for place, trajectory in played.trajectories.items())


def test_what_comes_together_is_written_together_and_acknowledged_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(segment.os, "fdatasync", lambda file: syncs.append(os.fstat(file).st_size))

    async def gather() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits())
        done: list[int] = []

        async def one(epoch: int) -> None:
            await journal.append([events.EpochRaised(epoch)])
            done.append(epoch)

        async with asyncio.TaskGroup() as tasks:
            for epoch in range(1, 101):
                tasks.create_task(one(epoch))
        assert done == list(range(1, 101))
        await journal.close()

    asyncio.run(gather())
    assert len(syncs) <= 4  # the beginning, the first batch, what gathered meanwhile
    assert Archive(tmp_path).state().epoch == 100


def test_nothing_is_acknowledged_before_it_is_durable_and_nothing_is_written_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits())
        await journal.append([events.EpochRaised(1)])
        monkeypatch.setattr(segment.os, "fdatasync", broken)
        with pytest.raises(
            Exception, match=r"00000001\.log: cannot be written, after .* bytes of journal: Input/output"
        ):
            await journal.append([events.EpochRaised(2)])
        monkeypatch.undo()
        size = (tmp_path / "00000001.log").stat().st_size
        with pytest.raises(Exception, match="cannot be written"):
            await journal.append([events.EpochRaised(3)])
        with pytest.raises(Exception, match="cannot be written"):
            await journal.close()
        assert (tmp_path / "00000001.log").stat().st_size == size

    def broken(file: int) -> None:
        raise OSError(5, os.strerror(5))

    asyncio.run(fail())


def test_a_place_of_another_kind_or_run_is_refused(tmp_path: Path) -> None:
    played = write(tmp_path)
    archive = Archive(tmp_path)
    place, *_ = played.trajectories
    draw = archive.draws()[0]
    for wrong in (draw, Place(1, place.offset + 1, place.nbytes), Place(1, 10**9, 10)):
        with pytest.raises(JournalDamaged, match=r"bytes \d+ to \d+ are not those that were written"):
            archive.get(wrong)
    with pytest.raises(JournalDamaged, match="are not those that were written"):
        archive.get_draw(place)
    with pytest.raises(JournalDamaged, match=r"00000009\.log: is gone"):
        archive.get(Place(9, 0, 10))


def test_the_events_of_each_batch_and_each_snapshot_are_there_twice(tmp_path: Path) -> None:
    write(tmp_path)
    found = records(tmp_path / "00000001.log", Kind.EVENTS, Kind.SNAPSHOT)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(one.number == two.number and one.frames == two.frames for one, two in pairs)


def test_a_deleted_segment_is_not_held_open(tmp_path: Path) -> None:
    """Its room would not be free."""

    async def read_and_delete() -> None:
        journal, _ = DiskJournal.open(tmp_path, RULES, limits(cache_bytes=0, keep="checkpoint"))
        place = journal.put(0, 0, long_trajectory())
        await journal.append([])
        journal.get(place)
        await journal.append([events.Checkpointed(0)])
        assert not [name for name in open_files() if name.startswith(str(tmp_path / "00000001"))]
        assert [name for name in open_files() if name.startswith(str(tmp_path / "00000002"))]
        with pytest.raises(JournalDamaged, match="is gone"):
            journal.get(place)
        await journal.close()

    asyncio.run(read_and_delete())


def open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this look itself
            names.append(str(link.readlink()))
    return names
