"""Which work a worker gets: evaluation first, then what came back, then new groups, each in admission order.

Pure: the state in, the events out. A group is never split; a worker gets only what its weights are young
enough for, judged at every grant, and nobody sits on a lease waiting for weights.
"""

from async_rl.buffers import admission, events
from async_rl.buffers.group import Group
from async_rl.buffers.state import State
from async_rl.protocol.buffer import LeaseId, Stage


def generate(state: State, worker: str, incarnation: str, n: int, version: int) -> list[events.Any]:
    """Leases for at most `n` trajectories to a worker whose weights are `version`."""
    granted: list[events.Any] = []
    for group in state.held_out.in_order("waiting"):
        if group.exact_version != version:
            continue
        members = group.missing
        if len(members) > n:
            return granted
        n -= len(members)
        granted.append(_lease(group.id, group.attempt, "generate", worker, incarnation, members, version))
    for group in state.training.in_order("waiting"):
        oldest = oldest_weights(state, group)
        if version < oldest:
            continue
        members = group.missing
        if len(members) > n:
            return granted
        n -= len(members)
        granted.append(_lease(group.id, group.attempt, "generate", worker, incarnation, members, oldest))
    return granted + _admit(state, worker, incarnation, n, version)


def oldest_weights(state: State, group: Group) -> int:
    """The weights that a group that came back may be sampled with, at least.

    It is due anew, as if it were admitted now: since it was admitted, others may have been drawn before it,
    and what it was due for may be taken. Finished members keep their deadline: new ones are no older.
    """
    eta_prime = state.settings.eta_prime(group.eta)
    oldest = admission.min_version(state.due(state.m - 1), state.version, eta_prime)
    return oldest if group.sampled is None else max(oldest, group.sampled)


def _admit(state: State, worker: str, incarnation: str, n: int, version: int) -> list[events.Any]:
    size, eta_prime = state.settings.group_size, state.settings.eta_prime(state.eta)
    again, cursor, m, number = iter(state.again), state.cursor, state.m, state.admitted
    granted: list[events.Any] = []
    for _ in range(min(state.capacity, n // size)):
        oldest = admission.min_version(state.due(m), state.version, eta_prime)
        if version < oldest:
            break
        position = next(again, -1)
        repeated = position >= 0
        if not repeated and (state.settings.tasks is None or cursor < state.settings.tasks):
            position, cursor = cursor, cursor + 1
        if position < 0:
            break
        granted.append(events.Admitted(number, position, repeated, state.eta))
        granted.append(_lease(number, 0, "generate", worker, incarnation, list(range(size)), oldest))
        m, number = m + 1, number + 1
    return granted


def score(state: State, worker: str, incarnation: str, n: int) -> list[events.Any]:
    """Leases for at most `n` trajectories; the first group is given whole even where it is larger, since a
    reward worker queues what it cannot grade at once."""
    granted: list[events.Any] = []
    for pool in (state.held_out, state.training):
        for group in pool.in_order("generated"):
            members = group.unscored
            if granted and len(members) > n:
                return granted
            n -= len(members)
            granted.append(_lease(group.id, group.attempt, "score", worker, incarnation, members, -1))
            if n <= 0:
                return granted
    return granted


def _lease(
    group: int, attempt: int, stage: Stage, worker: str, incarnation: str, members: list[int], oldest: int
) -> events.Leased:
    return events.Leased(LeaseId(group, attempt, stage), worker, incarnation, members, oldest)
