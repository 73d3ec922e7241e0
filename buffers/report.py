"""What people see of the buffer: the conservation line, the table of groups, what a draw waits for."""

from async_rl.buffers.core import Core
from async_rl.buffers.for_trainer import Waiting
from async_rl.buffers.group import Group
from async_rl.buffers.roster import total
from async_rl.protocol.buffer import BufferReport, LeaseId, Stage

KINDS: dict[Stage, str] = {"generate": "rollout", "score": "reward"}
ROWS = 50
"""Groups shown in a table, the oldest first."""


def buffer_report(core: Core, now: float) -> BufferReport:
    state, workers = core.state, core.roster.workers
    left = {f"{KINDS[stage]} workers that left": stats for stage, stats in core.roster.left.items()}
    gone = state.trained + sum(state.dropped.values()) + sum(state.failed.values())
    return BufferReport(
        version=state.version,
        admitted=state.admitted,
        held=state.held,
        trained=state.trained,
        dropped=dict(state.dropped),
        failed=dict(state.failed),
        states={phase: len(ids) for phase, ids in state.training.phases.items() if ids},
        conserved=state.admitted == gone + state.held,
        lapsed=state.lapsed,
        tokens=state.tokens,
        workers={name: total(worker) for name, worker in workers.items()} | left,
        worker_versions={name: worker.version for name, worker in workers.items() if worker.stage == "generate"},
        oldest_lease=oldest_lease(core, now),
        ended=state.closed is not None or state.broken is not None,
    )


def conservation_line(core: Core) -> str:
    state = core.state
    dropped, failed = sum(state.dropped.values()), sum(state.failed.values())
    return (
        f"admitted {state.admitted} = trained {state.trained} + dropped {dropped} {_counts(state.dropped)}"
        f"+ failed {failed} {_counts(state.failed)}+ held {state.held}"
    )


def waiting_reason(core: Core, waiting: Waiting, now: float) -> str:
    """What the draw misses, who holds it, and which settings govern it."""
    state = core.state
    phases = ", ".join(f"{len(ids)} {phase}" for phase, ids in state.training.phases.items() if ids)
    parts = [
        f"step {state.version} waits: {waiting.ready} of {waiting.size} groups are ready, held: {phases or 'none'}"
    ]
    late = None if waiting.late is None else state.find(waiting.late)
    if late is not None:
        held = "" if late.lease is None else f", {_lease_text(core, late.lease.id, now)}"
        parts.append(
            f"without group {late.id} (deadline {state.deadline(late)}{held}) the rest would miss its "
            f"deadlines (staleness.on_exceed = '{core.settings.on_exceed}')"
        )
    parts.append(f"oldest lease: {oldest_lease(core, now) or 'none is open'}")
    if not state.leases:
        live = [worker.version for worker in core.roster.live(now).values() if worker.stage == "generate"]
        parts.append(f"rollout workers alive: {len(live)}, newest weights {max(live, default=-1)}")
    parts.append(
        f"a silent holder loses its lease after services.lease_s = {core.settings.lease_s:g} s, "
        "the trainer waits for trainer.draw_wait_s"
    )
    return "; ".join(parts)


def _row(core: Core, group: Group, now: float) -> str:
    done = f"{len(group.trajectories)}/{len(group.wanted)}"
    oldest, deadline = _number(group.oldest), _number(core.state.deadline(group))
    lease = "" if group.lease is None else _lease_text(core, group.lease.id, now)
    return (
        f"{group.id:5}  {group.position:4}  {group.phase:9}  {group.attempt:7}  {done:>9}  "
        f"{len(group.scores):6}  {oldest:>6}  {deadline:>8}  {lease}"
    ).rstrip()


def oldest_lease(core: Core, now: float) -> str:
    oldest = core.roster.oldest(core.state.leases)
    return "" if oldest is None else _lease_text(core, oldest, now)


def table(core: Core, now: float) -> str:
    """One line a held group, the oldest first, under the conservation line."""
    state = core.state
    lines = [
        conservation_line(core),
        "group  task  state      attempt  generated  scored  oldest  deadline  lease",
    ]
    groups = [state.training.groups[number] for number in sorted(state.training.groups)]
    for group in groups[:ROWS]:
        lines.append(_row(core, group, now))
    if len(groups) > ROWS:
        lines.append(f"... and {len(groups) - ROWS} more")
    return "\n".join(lines)


def _lease_text(core: Core, lease: LeaseId, now: float) -> str:
    held = core.state.leases[lease]
    age = max(0.0, now - core.roster.granted(lease, now))
    return f"group {lease.group} ({lease.stage}, attempt {lease.attempt}) held by {held.worker} for {age:.1f} s"


def _counts(reasons: dict[str, int]) -> str:
    return f"({', '.join(f'{reason} {count}' for reason, count in reasons.items())}) " if reasons else ""


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
