"""The workers' commands: leases, signs of life, results."""

from async_rl.buffers import events, fitness, grants
from async_rl.buffers.core import Core
from async_rl.buffers.group import Lease
from async_rl.buffers.store import outline
from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import LeaseId, LeaseReply, Stage, WorkerStats
from async_rl.trajectory import Score, Trajectory

WHOLE = -1
"""Stands for all members of a lease."""


class ForWorkers:
    def __init__(self, core: Core) -> None:
        self._core = core

    def acquire(self, worker: str, incarnation: str, stage: Stage, n: int, version: int, now: float) -> list[Lease]:
        """Leases for at most `n` trajectories; AsyncRLError for a replaced incarnation, or n < 1."""
        core, state = self._core, self._core.state
        if n < 1:
            raise AsyncRLError(f"{worker} asks for {n} trajectories; no group is that small, ask for 1 at least")
        if core.roster.greet(worker, incarnation, stage, version, now):  # also the first one after a restart of ours
            mine = [lease for lease in state.leases.values() if lease.worker == worker]
            dead = [lease.id for lease in mine if lease.incarnation != incarnation]
            self._lapse(dead, f"{worker} was started anew")
        if state.closed is not None or state.broken is not None:
            return []
        if stage == "score":
            chosen = grants.score(state, worker, incarnation, n)
            granted: list[events.Any] = [e for e in chosen if isinstance(e, events.Leased) and self._whole(e)]
        else:
            self._restart_evaluations(version, now)
            granted = grants.generate(state, worker, incarnation, n, version, sharers=core.roster.sharers(now))
        core.record(*granted)
        leases = [state.leases[event.lease] for event in granted if isinstance(event, events.Leased)]
        for lease in leases:
            core.roster.grant(lease.id, now)
        state.check()
        return leases

    def started(self, worker: str, incarnation: str, lease: LeaseId, version: int, now: float) -> LeaseReply:
        """Sampling began at `version`: the group's deadline follows from it."""
        self._core.roster.alive(worker, incarnation, now)
        held = self._held(worker, incarnation, lease)
        if held is None:
            return LeaseReply("revoked", self.why_gone(lease))
        self._core.roster.extend(lease, now)
        return self._note_version(held, version)

    def extend(
        self, worker: str, incarnation: str, leases: list[tuple[LeaseId, int]], stats: WorkerStats, now: float
    ) -> list[tuple[LeaseId, str]]:
        """The worker lives and holds `leases`, each with its oldest version (-1: no token yet). Those that
        are not its own any more come back, with the reason."""
        roster = self._core.roster
        roster.alive(worker, incarnation, now)
        roster.report(worker, incarnation, stats)
        revoked: list[tuple[LeaseId, str]] = []
        for lease, version in leases:
            held = self._held(worker, incarnation, lease)
            if held is None:
                revoked.append((lease, self.why_gone(lease)))
                continue
            roster.extend(lease, now)
            if lease.stage == "generate" and version >= 0:
                reply = self._note_version(held, version)
                if reply.outcome == "revoked":
                    revoked.append((lease, reply.reason))
        return revoked

    def finish_generate(
        self, worker: str, incarnation: str, lease: LeaseId, member: int, trajectory: Trajectory, now: float
    ) -> LeaseReply:
        held = self._owed(worker, incarnation, lease, member, now)
        if isinstance(held, LeaseReply):
            return held
        state = self._core.state
        group = state.pool(lease.group).groups[lease.group]
        in_flight = self._core.settings.in_flight
        wrong = fitness.unfit_trajectory(group, held, trajectory, newest=state.version, in_flight=in_flight)
        if wrong is not None:
            return self._refuse(lease, member, wrong)
        place = self._core.store.put(lease.group, member, trajectory)
        return self._take(lease, events.Generated(lease, member, outline(trajectory, place)))

    def finish_score(
        self, worker: str, incarnation: str, lease: LeaseId, member: int, score: Score, now: float
    ) -> LeaseReply:
        held = self._owed(worker, incarnation, lease, member, now)
        if isinstance(held, LeaseReply):
            return held
        wrong = fitness.unfit_score(score)
        if wrong is not None:
            return self._refuse(lease, member, wrong)
        return self._take(lease, events.Scored(lease, member, score))

    def fail(
        self,
        worker: str,
        incarnation: str,
        lease: LeaseId,
        member: int | None,
        reason: str,
        now: float,
        *,
        fault: bool = True,
    ) -> LeaseReply:
        """An infrastructure fault of the worker: `member`, or what is open of the lease, is handed out again.
        What the group has already is kept. `fault` False: a worker that stops hands its lease back."""
        held = self._owed(worker, incarnation, lease, WHOLE if member is None else member, now, failing=True)
        if isinstance(held, LeaseReply):
            return held
        if member is not None:
            self._core.record(events.MemberFailed(lease, member, reason))
        else:
            self._core.record(events.LeaseFailed(lease, reason) if fault else events.LeaseReturned(lease))
        self._core.follow(lease.group, f"{worker}: {reason}")
        self._core.state.check()
        return LeaseReply("accepted")

    def lapse(self, now: float) -> list[LeaseId]:
        """Take back the leases whose holder was silent for services.lease_s, and those that last too long."""
        state, roster, rules = self._core.state, self._core.roster, self._core.settings
        silent = roster.silent(state.leases, now)
        self._lapse(silent, f"its holder was silent for services.lease_s = {rules.lease_s:g}")
        overdue = roster.overdue(state.leases, now)
        self._lapse(overdue, f"not done within services.lease_max_s = {rules.lease_max_s:g}")
        state.check()
        return silent + overdue

    def why_gone(self, lease: LeaseId) -> str:
        """What a worker is told of a lease that is not its own any more."""
        state = self._core.state
        over = state.over.get(lease.group)
        if over is not None:
            return f"group {lease.group} is {over.how}"
        if state.find(lease.group) is not None:
            return f"attempt {lease.attempt} at group {lease.group} ended, its work was handed out again"
        return f"group {lease.group} is over"

    def _lapse(self, leases: list[LeaseId], reason: str) -> None:
        for lease in leases:
            holder = self._core.state.leases[lease].worker
            self._core.record(events.Lapsed(lease, reason))
            self._core.follow(lease.group, f"{holder}: {reason}")

    def _held(self, worker: str, incarnation: str, lease: LeaseId) -> Lease | None:
        held = self._core.state.leases.get(lease)
        mine = held is not None and (held.worker, held.incarnation) == (worker, incarnation)
        return held if mine else None

    def _owed(
        self, worker: str, incarnation: str, lease: LeaseId, member: int, now: float, *, failing: bool = False
    ) -> Lease | LeaseReply:
        """The lease by which the worker owes `member`, or the answer that ends the matter: a repeat gets its
        first answer, a late worker is told so."""
        self._core.roster.alive(worker, incarnation, now)
        taken = self._receipt(lease, member)
        if taken is not None:
            if taken != failing:
                return LeaseReply("repeat")
            return LeaseReply("revoked", f"it was {'finished' if taken else 'given up'} before")
        held = self._held(worker, incarnation, lease)
        if held is None:
            return LeaseReply("revoked", self.why_gone(lease))
        self._core.roster.extend(lease, now)
        if member != WHOLE and member not in held.open:
            return LeaseReply("revoked", f"member {member} is no part of the lease; it has {held.open} open")
        return held

    def _receipt(self, lease: LeaseId, member: int) -> bool | None:
        """True: this result was taken before; False: it was given up; None: neither, as is remembered."""
        group = self._core.state.find(lease.group) or self._core.state.over.get(lease.group)
        return None if group is None else group.receipts.get((lease.stage, lease.attempt, member))

    def _take(self, lease: LeaseId, result: events.Generated | events.Scored) -> LeaseReply:
        self._core.record(result)
        self._core.follow(lease.group)
        self._core.state.check()
        return LeaseReply("accepted")

    def _refuse(self, lease: LeaseId, member: int, wrong: str) -> LeaseReply:
        self._core.record(events.MemberFailed(lease, member, wrong))
        self._core.follow(lease.group, wrong)
        self._core.state.check()
        return LeaseReply("refused", wrong)

    def _whole(self, granted: events.Leased) -> bool:
        """Whether what is to be scored can be read; what cannot is generated again."""
        group = self._core.state.find(granted.lease.group)
        return group is not None and not self._core.lose_damaged([group], granted.members)

    def _note_version(self, held: Lease, version: int) -> LeaseReply:
        """The lease's oldest token has `version`; one that it may not have costs the lease."""
        state = self._core.state
        exact = state.pool(held.id.group).groups[held.id.group].exact_version
        wrong = fitness.unfit_version(held, version, newest=state.version, exact=exact)
        if wrong is not None:
            self._core.record(events.LeaseFailed(held.id, wrong))
            self._core.follow(held.id.group, f"{held.worker}: {wrong}")
            state.check()
            return LeaseReply("revoked", wrong)
        if held.started is None:
            self._core.record(events.StartedAt(held.id, version))
        return LeaseReply("accepted")

    def _restart_evaluations(self, version: int, now: float) -> None:
        """A worker came with `version`: evaluations that nobody can sample any more begin again.

        Those whose samples are all made only wait for their scores. A task that waits for a second chance
        abstains instead: one that fails every time would have all the others sampled again, version after version.
        """
        core = self._core
        behind = [e for e in core.state.evaluations.values() if not e.done and e.version < version]
        if not behind:
            return
        live = core.roster.live(now).values()
        versions = [worker.version for worker in live if worker.stage == "generate"]
        for evaluation in behind:
            waiting = [g for g in core.state.held_out.in_order("waiting") if g.asked == evaluation.asked]
            if not waiting or min(versions) <= evaluation.version:
                continue
            if all(group.refilled or (group.failures and evaluation.restarted) for group in waiting):
                core.record(*[events.Evaluated(group.id) for group in waiting])
            else:
                core.begin_evaluation(evaluation.asked, max(versions), evaluation.restarted + 1)
