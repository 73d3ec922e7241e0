"""Which work a worker gets: evaluation first, then what came back, then new groups, each in admission order.

Pure: the state in, the events out. A group is never split; a worker gets only what its weights are young
enough for, judged at every grant, and nobody sits on a lease waiting for weights.
"""

from async_rl.buffers import admission, events
from async_rl.buffers.group import Group, Phase
from async_rl.buffers.state import State
from async_rl.protocol.buffer import LeaseId, Stage

SUSPECT = 2
"""Failures after which a group may be what kills its workers: a worker then holds one such group at a time, so
that it takes no others along until its attempts are used up."""


class _Basket:
    """What one Acquire gets: at most `room` trajectories, in the order in which they are put in."""

    def __init__(self, worker: str, incarnation: str, stage: Stage, room: int) -> None:
        self.room = room
        self.events: list[events.Any] = []
        self.worker = worker
        self._incarnation, self._stage = incarnation, stage

    def put(self, group: int, attempt: int, members: list[int], oldest: int) -> None:
        self.room -= len(members)
        lease = LeaseId(group, attempt, self._stage)
        self.events.append(events.Leased(lease, self.worker, self._incarnation, members, oldest))


def generate(
    state: State, worker: str, incarnation: str, n: int, version: int, *, sharers: int = 1
) -> list[events.Any]:
    """Leases for at most `n` trajectories to a worker whose weights are `version`.

    sharers: rollout workers alive. One takes no more of the new groups than its share at a time, so that
    where few may be admitted (sync) the others are not left idle.
    """
    basket = _Basket(worker, incarnation, "generate", n)
    if _held_out(state, basket, version) and _came_back(state, basket, version):
        _admit(state, basket, version, sharers)
    return basket.events


def score(state: State, worker: str, incarnation: str, n: int) -> list[events.Any]:
    """Leases for at most `n` trajectories; the first group is given whole even where it is larger, since a
    reward worker queues what it cannot grade at once."""
    basket = _Basket(worker, incarnation, "score", n)
    for pool in (state.held_out, state.training):
        for group in pool.in_order("generated"):
            members = group.unscored
            if len(members) > basket.room and basket.events:
                return basket.events
            basket.put(group.id, group.attempt, members, -1)
    return basket.events


def any_work(state: State, stage: Stage) -> bool:
    """Whether there is something that some worker of `stage` might be given."""
    phase: Phase = "waiting" if stage == "generate" else "generated"
    came_back = state.training.count(phase) or state.held_out.count(phase)
    return bool(came_back) or (stage == "generate" and state.capacity > 0 and not state.exhausted)


def oldest_weights(state: State, group: Group, placed: int) -> int:
    """The weights that a group that came back may be sampled with, at least.

    placed: groups trained, and held ones that have a token or a lease, hence a deadline. A group without any
    is due anew after them, as if it were admitted now: others may have been drawn before it, and the steps
    it was due for may be taken. With tokens it has its deadline, which new members must not lower.
    """
    eta_prime = state.settings.eta_prime(group.eta)
    if group.sampled is None:
        return admission.min_version(state.due(placed), state.version, eta_prime)
    return max(group.sampled, admission.min_version(0, state.version, eta_prime))


def _held_out(state: State, basket: _Basket, version: int) -> bool:
    """False: the next group has no room, and nothing may overtake it. So in the functions below."""
    for group in state.held_out.in_order("waiting"):
        if group.exact_version != version:
            continue
        members = group.missing
        if len(members) > basket.room:
            return False
        basket.put(group.id, group.attempt, members, version)
    return True


def _came_back(state: State, basket: _Basket, version: int) -> bool:
    waiting = state.training.in_order("waiting")
    placed = state.m - sum(group.sampled is None for group in waiting)
    suspects = any(group.failures >= SUSPECT for group in waiting)
    holds_suspect = suspects and _holds_suspect(state, basket.worker)
    for group in waiting:
        oldest = oldest_weights(state, group, placed)
        suspect = group.failures >= SUSPECT
        if version < oldest or (suspect and holds_suspect):
            continue
        members = group.missing
        if len(members) > basket.room:
            return False
        basket.put(group.id, group.attempt, members, oldest)
        placed += group.sampled is None
        holds_suspect = holds_suspect or suspect
    return True


def _holds_suspect(state: State, worker: str) -> bool:
    groups = state.training.groups
    mine = (lease.id.group for lease in state.leases.values() if lease.worker == worker)
    return any(number in groups and groups[number].failures >= SUSPECT for number in mine)


def _admit(state: State, basket: _Basket, version: int, sharers: int) -> None:
    settings = state.settings
    members, eta_prime = settings.members, settings.eta_prime(state.eta)
    share = -(-state.capacity // max(1, sharers))
    again, cursor, m, number = iter(state.again), state.cursor, state.m, state.admitted
    for _ in range(min(share, basket.room // len(members))):
        oldest = admission.min_version(state.due(m), state.version, eta_prime)
        position = next(again, -1)
        first_in_line = position >= 0
        if not first_in_line:
            position, cursor = cursor, cursor + 1
        beyond = settings.tasks is not None and position >= settings.tasks
        if version < oldest or beyond:
            return
        basket.events.append(events.Admitted(number, position, first_in_line, state.eta))
        basket.put(number, 0, members, oldest)
        m, number = m + 1, number + 1
