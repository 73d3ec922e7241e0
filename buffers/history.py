"""What a journal tells of one group: what happened to it, and what its members are. Held or ended."""

from collections.abc import Iterator
from datetime import datetime

from msgspec import Struct, field

from async_rl.buffers import events
from async_rl.buffers.group import Place
from async_rl.buffers.journal.archive import Archive
from async_rl.buffers.store import KeptGroup
from async_rl.errors import JournalDamaged, UserError
from async_rl.trajectory import Score, Trajectory


class Known(Struct):
    """A member: where its trajectory lies, and its score once it has one."""

    place: Place
    score: Score | None = None
    fate: str = ""  # why it is no part of the group any more


class History(Struct):
    group: int
    lines: list[str] = field(default_factory=list)
    members: dict[int, Known] = field(default_factory=dict)
    drawn: KeptGroup | None = None  # as the trainer got it


def history(archive: Archive, number: int) -> History:
    """UserError where nothing that is left of the journal names the group."""
    found = History(number)
    before = archive.first_state()
    group = before.find(number)
    if group is not None:
        found.lines.append(f"{'':23}  the journal begins later; it was {group.phase} then, in attempt {group.attempt}")
        for member, outline in group.trajectories.items():
            found.members[member] = Known(outline.place, group.scores.get(member))
    drawn: range | None = None  # the steps that it is trained in
    for time, event in archive.events():
        if isinstance(event, events.SettingsChanged):
            before.settings = event.settings
        if isinstance(event, events.Drawn) and number in event.groups:
            drawn = range(event.step, event.step + before.settings.reuse)
        _note(found, event)
        text = _told(event, number, drawn)
        if text:
            found.lines.append(f"{_clock(time)}  {text}")
    _look_at_draws(archive, found)
    if not found.lines and found.drawn is None:
        raise UserError(f"group {number}: nothing that is left of the journal names it")
    return found


def _look_at_draws(archive: Archive, found: History) -> None:
    """The draw knows the task, and members whose own events the journal has no more."""
    for place in archive.draws().values():
        try:
            draw = archive.get_draw(place)
        except JournalDamaged as error:
            found.lines.append(f"{'':23}  a draw that may name it is damaged: {error}")
            continue
        for group in draw.groups:
            if group.group == found.group:
                found.drawn = group
                for member in group.everyone:
                    found.members.setdefault(member.member, Known(member.place, member.score))
                return


def _note(found: History, event: events.Any) -> None:
    """What `event` changes of the members."""
    match event:
        case events.Generated(lease=lease, member=member, outline=outline) if lease.group == found.group:
            found.members[member] = Known(outline.place)
        case events.Scored(lease=lease, member=member, score=score) if lease.group == found.group:
            found.members[member].score = score
        case events.Refilled(group=group, out=out) if group == found.group:
            for member in out:
                found.members[member].fate = "made room for another"
        case events.Lost(group=group, member=member) if group == found.group:
            found.members[member].fate = "lost"


def _told(event: events.Any, number: int, drawn: range | None) -> str:
    """`event` in words; "" where it does not concern the group."""
    match event:
        case events.Drawn(step=step, groups=groups, epoch=epoch):
            return f"drawn for step {step}, trainer {epoch}" if number in groups else ""
        case events.StepCommitted(step=step):
            return f"trained in step {step}" if drawn is not None and step in drawn else ""
        case events.EvaluationBegan(first=first, tasks=tasks, version=version):
            return f"evaluation at version {version} began" if first - tasks < number <= first else ""
        case (
            events.Leased(lease=lease)
            | events.StartedAt(lease=lease)
            | events.Generated(lease=lease)
            | events.Scored(lease=lease)
            | events.MemberFailed(lease=lease)
            | events.LeaseFailed(lease=lease)
            | events.LeaseReturned(lease=lease)
            | events.Lapsed(lease=lease)
        ):
            return _told_of_lease(event) if lease.group == number else ""
        case (
            events.Admitted(group=group)
            | events.Refilled(group=group)
            | events.Lost(group=group)
            | events.Readied(group=group)
            | events.Dropped(group=group)
            | events.Failed(group=group)
            | events.Evaluated(group=group)
        ):
            return _told_of_group(event) if group == number else ""
    return ""


def _told_of_group(event: events.Any) -> str:
    match event:
        case events.Admitted(position=position, eta=eta, again=again):
            return f"admitted{' again' if again else ''}: task {position}, eta {eta}"
        case events.Refilled(out=out, fresh=fresh):
            return f"members {out} have no vote; {fresh} are to be generated"
        case events.Lost(member=member, reason=reason):
            return f"member {member} lost, it is generated again: {reason}"
        case events.Readied():
            return "ready"
        case events.Dropped(reason=reason):
            return f"dropped({reason})"
        case events.Failed(reason=reason, detail=detail):
            return f"failed({reason}): {detail}"
    return "evaluated"


def _told_of_lease(event: events.Any) -> str:
    match event:
        case events.Leased(lease=lease, worker=worker, members=members, min_version=oldest):
            weights = f", weights of version {oldest} or later" if lease.stage == "generate" else ""
            return f"leased to {worker} to {lease.stage} members {members}, attempt {lease.attempt}{weights}"
        case events.StartedAt(version=version):
            return f"sampling began at version {version}"
        case events.Generated(member=member, outline=outline):
            cut = ", cut off by max_new_tokens" if outline.truncated else ""
            return f"member {member} generated by versions {outline.oldest} to {outline.youngest}{cut}"
        case events.Scored(member=member, score=score):
            return f"member {member} scored: {_score(score)}"
        case events.MemberFailed(member=member, reason=reason):
            return f"member {member} given up by its worker: {reason}"
        case events.LeaseFailed(lease=lease, reason=reason):
            return f"lease to {lease.stage} given up by its worker: {reason}"
        case events.LeaseReturned(lease=lease):
            return f"lease to {lease.stage} handed back by a worker that stops"
        case events.Lapsed(lease=lease, reason=reason):
            return f"lease to {lease.stage} lapsed: {reason}"
    return ""


def members(archive: Archive, found: History) -> Iterator[str]:
    """A line a member."""
    for member, known in sorted(found.members.items()):
        score = "no score" if known.score is None else _score(known.score)
        fate = f", {known.fate}" if known.fate else ""
        try:
            trajectory = archive.get(known.place)
        except JournalDamaged as error:
            yield f"member {member}: {score}{fate}, damaged: {error}"
            continue
        read = sum(len(sequence.tokens) - sequence.actions for sequence in trajectory.sequences)
        turns = f" in {trajectory.turns} turns" if trajectory.turns > 1 else ""
        yield (
            f"member {member}: {score}{fate}, {read} + {trajectory.sampled} tokens{turns}, "
            f"versions {_spans(trajectory)}, ended by {trajectory.stop}: {trajectory.text!r}"
        )


def _spans(trajectory: Trajectory) -> str:
    return ", ".join(f"{version} (x{count})" for version, count in trajectory.spans)


def _score(score: Score) -> str:
    reward = "no vote" if score.reward is None else f"reward {score.reward:g}"
    return f"{reward} ({score.status})"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).isoformat(sep=" ", timespec="milliseconds")
