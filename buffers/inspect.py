"""What a journal tells of the buffer, for `async-rl buffer`: the state, and the times that the state does not keep."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from async_rl.buffers import events, report
from async_rl.buffers.group import Group, Place
from async_rl.buffers.journal import record
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.journal.segment import Segments
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import State
from async_rl.errors import JournalDamaged
from async_rl.protocol.buffer import LeaseId


class Followed(Struct):
    """A state, and when what is in it began; times are unix seconds."""

    state: State
    begins: float | None = None  # the first event that is left
    latest: float = 0.0
    admitted: dict[int, float] = field(default_factory=dict)
    granted: dict[LeaseId, float] = field(default_factory=dict)

    def admitted_at(self, group: int) -> float:
        """What was there before the journal begins is as old as that, at least."""
        return self.admitted.get(group, self.begins or self.latest)

    def granted_at(self, lease: LeaseId) -> float:
        return self.granted.get(lease, self.begins or self.latest)


def follow(archive: Archive) -> Followed:
    """What happened, to the end. JournalDamaged."""
    seen = Followed(archive.first_state())
    for time, event in archive.events():
        seen.state.apply(event)
        seen.begins = time if seen.begins is None else seen.begins
        seen.latest = time
        match event:
            case events.Admitted(group=group):
                seen.admitted[group] = time
            case events.Leased(lease=lease):
                seen.granted[lease] = time
            case events.Dropped(group=group) | events.Failed(group=group):
                seen.admitted.pop(group, None)
    return seen


def overview(seen: Followed, now: float) -> Iterator[str]:
    """Version, conservation, states, the oldest lease, and a line a held group, the oldest first."""
    state = seen.state
    core = Machine(state.settings, state)
    for lease in state.leases:
        core.roster.grant(lease, seen.granted_at(lease))
    yield f"version {state.version} of {state.settings.max_steps}, eta {state.eta}{_end(state)}"
    yield report.conservation_line(core)
    phases = [f"{len(ids)} {phase}" for phase, ids in state.training.phases.items() if ids]
    yield f"held: {', '.join(phases) or 'nothing'}"
    if state.held_out.groups:
        yield f"evaluation: {len(state.held_out.groups)} groups under way"
    yield f"oldest lease: {report.oldest_lease(core, now) or 'none is open'}"
    held = [state.training.groups[number] for number in sorted(state.training.groups)]
    if held:
        yield "group  task  state      attempt  generated  scored  version  lag      age  lease"
    for group in held[: report.ROWS]:
        yield _row(seen, group, now)
    if len(held) > report.ROWS:
        yield f"... and {len(held) - report.ROWS} more"


def _end(state: State) -> str:
    if state.broken is not None:
        return f"; it cannot go on: {state.broken}"
    return "" if state.closed is None else f"; closed: {state.closed}"


def _row(seen: Followed, group: Group, now: float) -> str:
    """`lag`: of its oldest token, were it trained now."""
    oldest, lag = ("-", "-") if group.oldest is None else (group.oldest, seen.state.version - group.oldest)
    lease = ""
    if group.lease is not None:
        age = max(0.0, now - seen.granted_at(group.lease.id))
        lease = f"{group.lease.id.stage}, {group.lease.worker}, {age:.1f} s"
    age = max(0.0, now - seen.admitted_at(group.id))
    return (
        f"{group.id:5}  {group.position:4}  {group.phase:9}  {group.attempt:7}  "
        f"{len(group.trajectories)}/{len(group.wanted):<7}  {len(group.scores):6}  {oldest:>7}  {lag:>3}  "
        f"{age:5.1f} s  {lease}"
    ).rstrip()


# --- the files ---------------------------------------------------------------------------------------


class Gap(Struct, frozen=True):
    """Bytes of a segment that are no whole record. `last`: nothing whole is behind them."""

    segment: int
    start: int
    end: int
    last: bool

    def covers(self, place: Place) -> bool:
        return place.segment == self.segment and place.offset < self.end and self.start < place.offset + place.nbytes


def files(folder: Path) -> Iterator[str]:
    """Size and segments of a journal, and what of it is damaged."""
    segments = Segments(folder)
    numbers = segments.numbers()
    nbytes = segments.nbytes()
    yield f"journal: {nbytes:,} bytes in {len(numbers)} segment{'s' if len(numbers) > 1 else ''} ({folder})"
    gaps = [gap for segment in numbers for gap in _gaps(segments.load(segment), segment)]
    if not gaps:
        yield "damaged: nothing"
        return
    names = _names(Archive(folder)) if any(not gap.last for gap in gaps) else {}
    for gap in gaps:
        where = f"{segments.path(gap.segment)}: bytes {gap.start} to {gap.end}"
        if gap.last:
            yield f"unfinished: {where}, a write that never got to its end"
            continue
        lost = [name for place, name in names.items() if gap.covers(place)]
        yield f"damaged: {where}: {', '.join(lost) or 'a copy of what happened'}"


def _gaps(data: bytes, segment: int) -> Iterator[Gap]:
    end = 0
    for found in record.scan(data, segment):
        if found.start > end:
            yield Gap(segment, end, found.start, last=False)
        end = found.end
    if end < len(data):
        yield Gap(segment, end, len(data), last=True)


def _names(archive: Archive) -> dict[Place, str]:
    """Of all that the journal names beside the events; what it told before it cannot be read any further."""
    names: dict[Place, str] = {}
    with contextlib.suppress(JournalDamaged):  # told by whoever needs the state
        for _, event in archive.events():
            match event:
                case events.Generated(lease=lease, member=member, outline=outline):
                    names[outline.place] = f"the trajectory of group {lease.group}, member {member}"
                case events.Drawn(step=step, place=place):
                    names[place] = f"the draw of step {step}"
    return names
