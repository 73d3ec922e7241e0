"""Who is alive: workers that come and go leave their counts behind, and nothing else."""

from async_rl.buffers.roster import TERMS, Roster
from async_rl.protocol.buffer import WorkerStats

LEASE_S = 10.0


def stats(tokens):
    return WorkerStats(up_s=2.0, busy_s=1.0, tokens=tokens, finished=1)


def worked(roster, name, incarnation, tokens, now):
    roster.greet(name, incarnation, "generate", 0, now)
    roster.report(name, incarnation, stats(tokens))


def test_a_worker_that_leaves_is_forgotten_at_once_and_its_counts_stay():
    roster = Roster(LEASE_S, 3600.0)
    worked(roster, "rollout-0", "a", 5, 0.0)
    worked(roster, "rollout-0", "b", 7, 1.0)  # its second life
    worked(roster, "rollout-1", "c", 11, 1.0)
    assert roster.sharers(1.0) == 2
    assert roster.leave("rollout-0", "b") == ["rollout-0"]
    assert set(roster.workers) == {"rollout-1"}
    assert roster.sharers(1.0) == 1
    assert roster.left["generate"].tokens == 12
    assert roster.left["generate"].up_s == 4.0


def test_an_earlier_incarnation_takes_nobody_along():
    roster = Roster(LEASE_S, 3600.0)
    worked(roster, "rollout-0", "a", 5, 0.0)
    worked(roster, "rollout-0", "b", 7, 1.0)
    assert roster.leave("rollout-0", "a") == []
    assert roster.leave("rollout-9", "a") == []
    assert set(roster.workers) == {"rollout-0"}


def test_a_thousand_workers_that_were_killed_are_forgotten():
    roster = Roster(LEASE_S, 3600.0)
    for number in range(1000):
        worked(roster, f"rollout-{number}", "a", 1, number * LEASE_S)
        roster.gone(number * LEASE_S)
        assert len(roster.workers) <= TERMS + 1
    assert roster.left["generate"].tokens + len(roster.workers) == 1000


def test_who_comes_back_under_its_name_is_new():
    roster = Roster(LEASE_S, 3600.0)
    worked(roster, "rollout-0", "a", 5, 0.0)
    roster.leave("rollout-0", "a")
    assert roster.greet("rollout-0", "b", "generate", 3, 2.0)
    assert roster.workers["rollout-0"].version == 3
