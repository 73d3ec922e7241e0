"""Leases: failures, lapses, late and repeated results, new incarnations. Numbers in docstrings are field
reports, tested with the values they gave."""

import pytest

from async_rl.buffers import report
from async_rl.buffers.for_trainer import Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import Batch
from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import LeaseId, WorkerStats
from async_rl.trajectory import Score
from tests.unit.buffer_material import (
    generate,
    grade,
    ready_groups,
    rollout,
    settings,
    train,
    trajectory,
)

ALONE = {"groups": 1, "group_size": 1}


def test_one_of_128_rollouts_that_never_returns_is_named_and_replaced() -> None:
    """7: 16 groups of 8; the draw names the lease, its holder and the settings; then it lapses."""
    machine = Machine(settings(groups=16, group_size=8, min_valid=4, eta=0, in_flight=False))
    leases = rollout(machine, 128, at=0)
    for lease in leases[:-1]:
        generate(machine, lease, at=0)
    generate(machine, leases[-1], at=0, members=7)
    grade(machine, now=1.0)
    waiting = machine.trainer.draw(0, 0)
    assert isinstance(waiting, Waiting)
    reason = report.waiting_reason(machine, waiting, now=20.0)
    assert "15 of 16 groups are ready" in reason
    assert "group 15 (generate, attempt 0) held by rollout-0 for 20.0 s" in reason
    assert "services.lease_s = 30" in reason and "trainer.draw_wait_s" in reason
    assert machine.workers.lapse(now=30.0) == []
    assert machine.workers.lapse(now=30.1) == [leases[-1].id]
    (again,) = rollout(machine, 128, at=0, worker="rollout-1", now=31.0)
    assert again.open == [7]  # the seven siblings are kept
    generate(machine, again, at=0, now=31.0)
    grade(machine, now=31.0)
    assert len(train(machine, 0)) == 16


def test_a_straggler_that_sleeps_for_ever_does_not_wedge_the_group_twice() -> None:
    """9: its worker lives, but stops extending this lease; others finish the group, the sleeper is told."""
    machine = Machine(settings(groups=1, group_size=2, min_valid=2, eta=0, lease_s=5.0))
    (lease,) = rollout(machine, 2, at=0)
    generate(machine, lease, at=0, members=1)
    for now in (2.0, 4.0, 6.0):
        machine.workers.extend("rollout-0", "i", [], WorkerStats(), now)
        machine.workers.lapse(now)
    (again,) = rollout(machine, 2, at=0, now=6.0, worker="rollout-1")
    assert again.open == [1]
    generate(machine, again, at=0, now=6.0)
    grade(machine, now=6.0)
    assert train(machine, 0) == [0]
    late = machine.workers.finish_generate("rollout-0", "i", lease.id, 1, trajectory((0, 1)), 7.0)
    assert late.outcome == "revoked" and late.reason == "group 0 is trained"


def test_a_failed_member_costs_its_siblings_nothing() -> None:
    """13: the other half of the group stays, and votes in the baseline."""
    machine = Machine(settings(groups=1, group_size=4, min_valid=4, eta=0))
    (lease,) = rollout(machine, 4, at=0)
    generate(machine, lease, at=0, members=2)
    assert machine.workers.fail("rollout-0", "i", lease.id, 2, "out of memory", 0.0).outcome == "accepted"
    assert machine.workers.fail("rollout-0", "i", lease.id, 2, "out of memory", 0.0).outcome == "repeat"
    generate(machine, lease, at=0)
    (again,) = rollout(machine, 4, at=0)
    assert again.open == [2]
    generate(machine, again, at=0)
    grade(machine)
    batch = machine.trainer.draw(0, 0)
    assert isinstance(batch, Batch) and batch.groups[0].voters == [0, 1, 2, 3]
    assert batch.groups[0].attempt == 1


def test_a_repeated_finish_gets_its_first_answer_even_after_the_group_was_trained() -> None:
    machine = Machine(settings(**ALONE, eta=0))
    (lease,) = rollout(machine, 1, at=0)
    finish = ("rollout-0", "i", lease.id, 0, trajectory((0, 1)), 0.0)
    assert [machine.workers.finish_generate(*finish).outcome for _ in range(3)] == [
        "accepted",
        "repeat",
        "repeat",
    ]
    grade(machine)
    train(machine, 0)
    assert machine.workers.finish_generate(*finish).outcome == "repeat"


def test_a_new_incarnation_of_a_worker_takes_the_old_ones_leases_away_at_once() -> None:
    machine = Machine(settings(groups=1, group_size=2, eta=0))
    (lease,) = rollout(machine, 2, at=0)
    (again,) = machine.workers.acquire("rollout-0", "anew", "generate", 2, 0, 0.0)
    assert (again.id.attempt, machine.state.lapsed) == (1, 1)
    late = machine.workers.finish_generate("rollout-0", "i", lease.id, 0, trajectory((0, 1)), 0.0)
    assert late.outcome == "revoked" and "handed out again" in late.reason
    with pytest.raises(AsyncRLError, match="was replaced by anew"):
        rollout(machine, 2, at=0)


def test_work_that_starts_on_older_weights_than_granted_is_revoked_and_handed_out_again() -> None:
    machine = Machine(settings(**ALONE, eta=1, max_steps=9))
    for step in range(3):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    (lease,) = rollout(machine, 1, at=3)
    reply = machine.workers.started("rollout-0", "i", lease.id, 1, 0.0)
    assert reply.outcome == "revoked" and "sampled at version 1, but granted for 2" in reply.reason
    (again,) = rollout(machine, 1, at=3)
    assert again.id.attempt == 1


def test_a_group_is_never_split_and_nobody_asks_for_nothing() -> None:
    machine = Machine(settings(groups=2, group_size=4, eta=0))
    assert rollout(machine, 3, at=0) == []
    assert [len(lease.open) for lease in rollout(machine, 7, at=0)] == [4]
    with pytest.raises(AsyncRLError, match="asks for 0 trajectories"):
        rollout(machine, 0, at=0)


def test_a_group_fails_after_so_many_attempts_and_frees_its_place() -> None:
    machine = Machine(settings(groups=1, group_size=1, eta=0, max_failures=2))
    for _ in range(2):
        (lease,) = rollout(machine, 1, at=0)
        machine.workers.fail("rollout-0", "i", lease.id, None, "engine died", 0.0)
    assert machine.state.failed == {"attempts": 1} and machine.state.held == 0
    assert ready_groups(machine, 1, at=0) == [1]
    assert machine.state.failed_in_row == 0


def test_failures_in_a_row_end_the_run_and_the_trainer_is_told() -> None:
    """8: a fault that does not go away is an error of the run, not an empty buffer polled for hours."""
    machine = Machine(settings(groups=1, group_size=1, eta=0, max_failures=2))
    for _ in range(4):
        (lease,) = rollout(machine, 1, at=0)
        machine.workers.fail("rollout-0", "i", lease.id, None, "engine died", 0.0)
    broken = "2 groups failed in a row (services.max_failures = 2); the last: group 1: 2 attempts, "
    assert machine.state.broken == broken + "the last: rollout-0: engine died"
    with pytest.raises(AsyncRLError, match="2 groups failed in a row"):
        machine.trainer.draw(0, 0)
    assert rollout(machine, 8, at=0) == []


def test_a_group_with_too_few_votes_gets_new_members_then_fails() -> None:
    machine = Machine(settings(groups=1, group_size=3, min_valid=2, eta=0))
    (lease,) = rollout(machine, 3, at=0)
    generate(machine, lease, at=0)
    (scores,) = machine.workers.acquire("reward-0", "r", "score", 3, -1, 0.0)
    for member in list(scores.open):
        verdict = Score(1.0) if member == 1 else Score(None, "abstained")
        machine.workers.finish_score("reward-0", "r", scores.id, member, verdict, 0.0)
    (fresh,) = rollout(machine, 3, at=0)
    assert fresh.open == [3, 4] and fresh.id.attempt == 1
    generate(machine, fresh, at=0)
    grade(machine, reward=None, status="abstained")
    assert machine.state.failed == {"min_valid": 1}


def test_results_of_a_reward_worker_that_fails_are_kept_member_by_member() -> None:
    machine = Machine(settings(groups=1, group_size=3, min_valid=3, eta=0))
    (lease,) = rollout(machine, 3, at=0)
    generate(machine, lease, at=0)
    (scores,) = machine.workers.acquire("reward-0", "r", "score", 1, -1, 0.0)  # a group is given whole
    machine.workers.finish_score("reward-0", "r", scores.id, 0, Score(1.0), 0.0)
    machine.workers.fail("reward-0", "r", scores.id, None, "killed", 0.0)
    (again,) = machine.workers.acquire("reward-1", "r", "score", 8, -1, 0.0)
    assert again.open == [1, 2] and again.id == LeaseId(0, 1, "score")


def test_where_few_groups_may_be_admitted_workers_share_them() -> None:
    machine = Machine(settings(groups=5, group_size=2, eta=0, in_flight=False))
    assert rollout(machine, 1, at=0, worker="rollout-1") == []  # alive, and without room for a group
    assert len(rollout(machine, 100, at=0, worker="rollout-0")) == 3
    assert len(rollout(machine, 100, at=0, worker="rollout-1")) == 1
    assert len(rollout(machine, 100, at=0, worker="rollout-1")) == 1
