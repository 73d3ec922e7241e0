"""What users of other systems reported about staleness and stuck buffers, with the values they gave; and the
promises of leases, draws and evaluations, one by one. Numbers in docstrings are field reports."""

import random
import re
import time
import tracemalloc

import pytest

from async_rl.buffers import report
from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch, new_state
from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import LeaseId, WorkerStats
from async_rl.trajectory import Score
from tests.unit.buffer_material import (
    Ring,
    RingWorker,
    generate,
    grade,
    plain,
    ready_groups,
    ring,
    rollout,
    settings,
    train,
    trajectory,
)

ALONE = {"groups": 1, "group_size": 1}


# --- staleness ---------------------------------------------------------------------------------------


def test_a_redone_run_admits_no_more_than_the_run_did() -> None:
    """1: eta=2, B=8, version 10 recovered from the events, nothing running: 24, never 104."""
    rules = settings(groups=8, group_size=1, eta=2, max_steps=1000)
    machine = Machine(rules)
    for step in range(10):
        ready_groups(machine, 8, at=step)
        train(machine, step)
    redone = new_state(rules)
    for event in machine.take():
        redone.apply(event)
    recovered = Machine(rules, redone)
    assert (recovered.state.version, recovered.state.held, recovered.state.capacity) == (10, 0, 24)
    assert len(rollout(recovered, 1000, at=10)) == 24


@pytest.mark.parametrize("on_exceed", ["wait", "drop", "mask", "correct"])
def test_a_bound_of_0_with_slow_weights_makes_progress_and_evicts_nothing(on_exceed: str) -> None:
    """2: max_staleness=0, the weights arrive late: every step is made, no sample was born stale."""
    hard_max = 0 if on_exceed == "correct" else None
    rules = settings(eta=0, on_exceed=on_exceed, hard_max=hard_max, in_flight=False, max_steps=20)
    run = ring(rules, 1)
    for worker in run.workers:
        worker.delay = 9.0
    run.run(limit=5000)
    assert run.machine.state.version == 20 and run.max_lag == 0
    assert run.machine.state.dropped == {} and run.machine.state.failed == {}


def test_at_0_no_group_is_started_on_the_weights_before() -> None:
    """3: the queue is empty and the step under way: a worker with the old weights gets nothing."""
    machine = Machine(settings(**ALONE, eta=0, in_flight=False))
    ready_groups(machine, 1, at=0)
    assert isinstance(machine.trainer.draw(0, 0), Batch)
    assert rollout(machine, 8, at=0) == []
    machine.trainer.finish_step(0, 0)
    assert rollout(machine, 8, at=0) == []
    (lease,) = rollout(machine, 8, at=1)
    assert lease.min_version == 1


def test_a_group_handed_out_again_during_a_step_waits_for_the_weights_of_the_next() -> None:
    """3: a lapsed group is not sampled again on weights that the step under way makes old."""
    machine = Machine(settings(groups=1, group_size=1, eta=1, in_flight=False))
    (slow,) = rollout(machine, 1, at=0, worker="slow")
    machine.workers.started("slow", "i", slow.id, 0, 0.0)
    ready_groups(machine, 1, at=0)
    assert train(machine, 0) == [1]
    machine.workers.acquire("slow", "anew", "score", 1, -1, 0.0)  # the slow one dies and comes back
    (again,) = rollout(machine, 1, at=1)
    assert (again.id.group, again.id.attempt) == (0, 1)
    generate(machine, again, at=1)
    grade(machine)
    assert train(machine, 1) == [0]


def test_sync_trains_every_token_at_the_trainers_version_in_a_whole_run() -> None:
    """3."""
    run = ring(settings(eta=0, in_flight=False, max_steps=15), 3, sigma=1.0, faults=0.02)
    run.run(limit=5000)
    assert run.max_lag == 0


@pytest.mark.parametrize(("eta", "drawn"), [(2, False), (3, True)])
def test_age_is_judged_again_at_the_draw(eta: int, drawn: bool) -> None:
    """4: sampled at v3, drawn at v6, bound 2: refused. 5: bound 3 accepts lag exactly 3."""
    machine = Machine(settings(**ALONE, eta=eta, on_exceed="drop", max_steps=100))
    for step in range(3):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    (old,) = rollout(machine, 1, at=3, worker="slow")
    machine.workers.started("slow", "i", old.id, 3, 0.0)
    for step in range(3, 6):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    reply = machine.workers.finish_generate("slow", "i", old.id, 0, trajectory((3, 5)), 0.0)
    grade(machine)
    if drawn:
        assert train(machine, 6) == [old.id.group]
    else:
        assert reply.outcome == "revoked" and "dropped(stale)" in reply.reason
        assert isinstance(machine.trainer.draw(6, 0), Waiting)


@pytest.mark.parametrize(("bound", "lag", "accepted"), [(0, 0, True), (2, 2, True), (2, 3, False)])
def test_lag_exactly_at_the_bound_is_accepted_and_one_more_refused(
    bound: int, lag: int, accepted: bool
) -> None:
    """5: under `drop`; one committed step raises the lag by exactly 1."""
    machine = Machine(settings(**ALONE, eta=bound, on_exceed="drop", max_steps=100))
    (late,) = rollout(machine, 1, at=0, worker="slow")
    machine.workers.started("slow", "i", late.id, 0, 0.0)
    for step in range(lag):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    assert (late.id in machine.state.leases) == accepted


def test_two_prompts_of_1_and_5_units_are_trained_equally_often() -> None:
    """6: bound 1 and `wait`: the slow prompt is not starved."""
    rules = settings(**ALONE, eta=1, tasks=None, max_steps=40)
    workers = [RingWorker("rollout-0", 1, 0.0), RingWorker("rollout-1", 1, 0.0)]
    run = Ring(Machine(rules), random.Random(0), workers, step_time=1.0)
    run.durations = {position: (1.0, 5.0)[position % 2] for position in range(100)}
    run.run(limit=2000)
    fast = sum(count for position, count in run.positions.items() if position % 2 == 0)
    assert (fast, sum(run.positions.values())) == (20, 40)
    assert run.max_lag <= 1


def test_under_drop_the_task_of_a_stale_group_comes_back_first_in_line() -> None:
    """6: its group is revoked at the next Extend; a new group of the same task is the next to be admitted."""
    machine = Machine(settings(**ALONE, eta=1, on_exceed="drop", max_steps=100))
    (slow,) = rollout(machine, 1, at=0, worker="slow")
    machine.workers.started("slow", "i", slow.id, 0, 0.0)
    for step in range(2):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    ((revoked, reason),) = machine.workers.extend("slow", "i", [(slow.id, 0)], WorkerStats(), 0.0)
    assert revoked == slow.id and reason == "group 0 is dropped(stale)"
    (again,) = rollout(machine, 1, at=2)
    group = machine.state.find(again.id.group)
    assert group is not None and group.position == 0 and group.id == 3
    assert machine.state.dropped == {"stale": 1}


def test_no_sample_mixes_versions_where_the_mode_promises_one() -> None:
    """10: versions 2, 4, 6 in one sample are refused, and the member is made anew without the old tokens."""
    machine = Machine(settings(groups=1, group_size=2, eta=10, in_flight=False, max_steps=100))
    for step in range(6):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    (lease,) = rollout(machine, 2, at=6)
    mixed = machine.workers.finish_generate(
        "rollout-0", "i", lease.id, 0, trajectory((2, 1), (4, 1), (6, 1)), 0.0
    )
    assert mixed.outcome == "revoked" and "mixes the versions [2, 4, 6]" in mixed.reason
    generate(machine, lease, at=6)
    (again,) = rollout(machine, 2, at=6)
    assert again.open == [0] and again.id == LeaseId(6, 1, "generate")


def test_rollouts_that_come_early_for_the_next_step_are_kept() -> None:
    """11: admission looks at versions alone; while step 0 is trained, groups for step 1 finish and stay."""
    machine = Machine(settings(groups=1, group_size=1, eta=1))
    ready_groups(machine, 2, at=0)
    batch = machine.trainer.draw(0, 0)
    assert isinstance(batch, Batch) and [group.id for group in batch.groups] == [0]
    assert machine.state.training.count("ready") == 1
    machine.trainer.finish_step(0, 0)
    assert train(machine, 1) == [1]


def test_a_group_keeps_the_bound_it_was_admitted_under() -> None:
    machine = Machine(settings(**ALONE, eta=2, max_steps=100))
    ready_groups(machine, 3, at=0)
    machine.trainer.change_eta(0)
    assert machine.state.capacity == 0
    assert [train(machine, step) for step in range(3)] == [[0], [1], [2]]
    ready_groups(machine, 1, at=3)
    batch = machine.trainer.draw(3, 0)
    assert isinstance(batch, Batch) and [group.eta for group in batch.groups] == [0]


def test_groups_that_come_back_together_are_due_one_after_the_other() -> None:
    """Two groups that others overtook lapse; a worker with old weights may not make both due for one step."""
    machine = Machine(settings(**ALONE, eta=3, max_steps=100))
    for step in range(5):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    late = rollout(machine, 2, at=5, worker="late")
    for lease in late:
        machine.workers.started("late", "i", lease.id, 5, 0.0)
    for step in (5, 6):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    machine.workers.acquire("late", "anew", "score", 1, -1, 0.0)
    again = rollout(machine, 2, at=4)
    assert [(lease.id.group, lease.min_version) for lease in again] == [(5, 4)]
    for lease in [*again, *rollout(machine, 1, at=5, worker="other")]:
        generate(machine, lease, at=max(4, lease.min_version))
    grade(machine)
    assert [train(machine, step) for step in (7, 8)] == [[5], [6]]


# --- reuse, mask, correct ----------------------------------------------------------------------------


def test_a_draw_is_trained_for_reuse_steps_and_is_the_same_batch() -> None:
    machine = Machine(settings(**ALONE, eta=2, reuse=2, max_steps=4))
    ready_groups(machine, 1, at=0)
    first = machine.trainer.draw(0, 0)
    assert machine.trainer.draw(0, 0) is first
    machine.trainer.finish_step(0, 0)
    assert machine.trainer.draw(1, 0) is first
    machine.trainer.finish_step(1, 0)
    ready_groups(machine, 1, at=1)
    second = machine.trainer.draw(2, 0)
    assert isinstance(second, Batch) and second is not first and second.step == 2
    assert machine.state.trained == 1
    machine.trainer.finish_step(2, 0)
    machine.trainer.finish_step(3, 0)
    assert isinstance(machine.trainer.draw(4, 0), Ended) and machine.state.trained == 2


def test_under_mask_a_group_without_a_token_inside_the_bound_is_dropped_before_the_draw() -> None:
    machine = Machine(settings(**ALONE, eta=1, on_exceed="mask", max_steps=100))
    leases = rollout(machine, 2, at=0, worker="slow")
    for lease in leases:
        machine.workers.started("slow", "i", lease.id, 0, 0.0)
    generate(machine, leases[1], at=0)
    grade(machine)
    assert train(machine, 0) == [1]
    ready_groups(machine, 1, at=1)
    assert train(machine, 1) == [2]
    young = rollout(machine, 1, at=2)
    machine.workers.finish_generate("slow", "i", leases[0].id, 0, trajectory((0, 9)), 0.0)
    grade(machine)
    assert isinstance(machine.trainer.draw(2, 0), Waiting)
    assert machine.state.dropped == {"stale": 1} and list(machine.state.again) == [0]
    machine.workers.finish_generate("rollout-0", "i", young[0].id, 0, trajectory((2, 1)), 0.0)
    grade(machine)
    assert train(machine, 2) == [3]


def test_under_mask_a_long_rollout_with_younger_tokens_is_kept() -> None:
    machine = Machine(settings(**ALONE, eta=1, on_exceed="mask", max_steps=100))
    leases = rollout(machine, 2, at=0)
    generate(machine, leases[1], at=0)
    grade(machine)
    train(machine, 0)
    ready_groups(machine, 1, at=1)
    train(machine, 1)
    machine.workers.finish_generate("rollout-0", "i", leases[0].id, 0, trajectory((0, 9), (1, 1)), 0.0)
    grade(machine)
    assert train(machine, 2) == [0]


def test_under_correct_a_group_may_exceed_eta_but_holds_the_draw_at_the_hard_bound() -> None:
    machine = Machine(settings(**ALONE, eta=1, on_exceed="correct", hard_max=3, max_steps=100))
    (slow,) = rollout(machine, 1, at=0, worker="slow")
    machine.workers.started("slow", "i", slow.id, 0, 0.0)
    for step in range(3):
        ready_groups(machine, 1, at=step)
        train(machine, step)
    ready_groups(machine, 1, at=3)
    refused = machine.trainer.draw(3, 0)
    assert isinstance(refused, Waiting) and refused.late == slow.id.group
    generate(machine, slow, at=0)
    grade(machine)
    assert train(machine, 3) == [slow.id.group]


# --- leases ------------------------------------------------------------------------------------------


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


# --- draws -------------------------------------------------------------------------------------------


def test_a_younger_trainer_gets_the_same_draw_and_the_older_is_refused() -> None:
    machine = Machine(settings(**ALONE, eta=0))
    ready_groups(machine, 1, at=0)
    first = machine.trainer.draw(0, 0)
    assert machine.trainer.draw(0, 1) is first
    for call in (machine.trainer.draw, machine.trainer.finish_step):
        with pytest.raises(AsyncRLError, match="trainer epoch 0 is older than 1"):
            call(0, 0)
    assert machine.trainer.finish_step(0, 1) == machine.trainer.finish_step(0, 1) == 1
    with pytest.raises(AsyncRLError, match="the next step is 1"):
        machine.trainer.draw(3, 1)
    with pytest.raises(AsyncRLError, match="a step is drawn first"):
        machine.trainer.finish_step(1, 1)


def data_of_three(at_end: str) -> Machine:
    machine = Machine(settings(groups=2, group_size=1, eta=1, tasks=3, at_end=at_end))
    ready_groups(machine, 3, at=0)
    assert train(machine, 0) == [0, 1]
    return machine


def test_when_the_data_ends_the_last_step_is_smaller() -> None:
    machine = data_of_three("smaller_step")
    assert train(machine, 1) == [2]
    assert machine.trainer.draw(2, 0) == Ended("the data ended after 3 tasks")


def test_when_the_data_ends_the_rest_is_dropped_where_that_is_asked() -> None:
    machine = data_of_three("drop")
    assert machine.trainer.draw(1, 0) == Ended("the data ended after 3 tasks")
    assert machine.state.dropped == {"end": 1}


def test_a_draw_that_nothing_can_change_ends_the_run() -> None:
    """Two groups are due for one step of one group, which only a defect can bring about."""
    machine = Machine(settings(**ALONE, eta=1))
    for number in ready_groups(machine, 2, at=0):
        machine.state.training.groups[number].eta = 0
    with pytest.raises(AsyncRLError, match="step 0 can never be drawn: 2 of 1 groups are ready"):
        machine.trainer.draw(0, 0)
    assert "can never be drawn" in (machine.state.broken or "")
    assert report.buffer_report(machine, 0.0).ended


def test_close_drops_what_is_held_and_tells_late_workers() -> None:
    machine = Machine(settings(groups=2, group_size=1, eta=1))
    ready_groups(machine, 1, at=0)
    (lease,) = rollout(machine, 1, at=0)
    machine.close("the trainer is done")
    machine.close("again")
    assert machine.state.dropped == {"end": 2} and machine.state.leases == {}
    late = machine.workers.finish_generate("rollout-0", "i", lease.id, 0, trajectory((0, 1)), 0.0)
    assert late.outcome == "revoked" and late.reason == "group 1 is dropped(end)"
    assert machine.trainer.draw(0, 0) == Ended("the run is closed: the trainer is done")


def test_the_table_names_every_held_group_and_its_holder() -> None:
    machine = Machine(settings(groups=2, group_size=2, eta=0))
    (lease, _) = rollout(machine, 4, at=0)
    generate(machine, lease, at=0, members=1)
    lines = report.table(machine, now=2.5).splitlines()
    assert lines[0] == "admitted 2 = trained 0 + dropped 0 + failed 0 + held 2"
    assert re.split(r"\s{2,}", lines[2].strip()) == [
        "0",
        "0",
        "leased",
        "0",
        "1/2",
        "0",
        "0",
        "0",
        "group 0 (generate, attempt 0) held by rollout-0 for 2.5 s",
    ]
    assert report.buffer_report(machine, 2.5).conserved


# --- evaluation --------------------------------------------------------------------------------------


def evaluating(**changes: object) -> Machine:
    return Machine(settings(groups=1, group_size=1, eta=1, held_out=2, samples=1, **changes))


def finish_evaluation(machine: Machine, leases: list) -> None:  # type: ignore[type-arg]
    for lease in leases:
        generate(machine, lease, at=lease.min_version)
    grade(machine)


def test_an_evaluation_goes_first_and_only_to_exactly_its_version() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    machine.trainer.evaluate(0)
    assert machine.trainer.evaluation(0) is None
    leases = rollout(machine, 3, at=0)
    assert [lease.id.group for lease in leases] == [-1, -2, 0]
    finish_evaluation(machine, leases)
    done = machine.trainer.evaluation(0)
    assert done is not None and done.done and done.restarted == 0
    assert machine.state.admitted == 1  # evaluation is outside of m, draws and conservation
    with pytest.raises(AsyncRLError, match="the newest is 0"):
        machine.trainer.evaluate(1)


def test_an_evaluation_whose_version_is_gone_starts_again_at_the_newest() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    (held,) = rollout(machine, 1, at=0, worker="rollout-1")  # one of the two tasks
    assert held.id.group == -1
    for lease in rollout(machine, 2, at=0):
        generate(machine, lease, at=0)
    grade(machine)
    train(machine, 0)
    rollout(machine, 8, at=1, now=10.0)  # rollout-1 still lives at version 0: no restart
    assert machine.state.evaluations[0].version == 0
    leases = rollout(machine, 8, at=1, now=31.0)  # rollout-1 is silent for longer than lease_s
    assert machine.state.evaluations[0].version == 1
    again = [lease for lease in leases if lease.id.group < 0]
    assert [lease.id.group for lease in again] == [-3, -4]
    finish_evaluation(machine, again)
    done = machine.trainer.evaluation(0)
    assert done is not None and (done.asked, done.version, done.restarted) == (0, 1, 1)


def test_a_held_out_sample_without_a_score_is_made_again_then_abstains() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    for _ in range(2):
        leases = [lease for lease in rollout(machine, 2, at=0) if lease.id.group < 0]
        assert len(leases) == 2
        for lease in leases:
            generate(machine, lease, at=0)
        grade(machine, reward=None, status="failed")
    done = machine.trainer.evaluation(0)
    assert done is not None
    assert [mark.reward for marks in done.marks.values() for mark in marks] == [None, None]


def test_a_held_out_task_that_no_worker_can_sample_abstains() -> None:
    machine = evaluating(max_failures=2)
    machine.trainer.evaluate(0)
    for _ in range(2):
        for lease in rollout(machine, 2, at=0):
            machine.workers.fail("rollout-0", "i", lease.id, None, "engine died", 0.0)
    assert machine.trainer.evaluation(0) is not None
    assert machine.state.broken is None


def test_a_run_at_its_end_with_an_evaluation_pending_ends_cleanly() -> None:
    """12: max_steps reached, nothing is trained any more; the evaluation of the last version is sampled, and
    after Close an unfinished one is refused with what it had."""
    machine = evaluating(max_steps=1)
    ready_groups(machine, 1, at=0)
    train(machine, 0)
    machine.trainer.evaluate(1)
    assert isinstance(machine.trainer.draw(1, 0), Ended)
    first, _ = rollout(machine, 8, at=1)
    finish_evaluation(machine, [first])
    machine.close("done")
    with pytest.raises(AsyncRLError, match="had 1 of 2 tasks when the run was closed"):
        machine.trainer.evaluation(1)
    with pytest.raises(AsyncRLError, match="the run is closed"):
        machine.trainer.evaluate(0)


# --- size and speed ----------------------------------------------------------------------------------


def long_run(rules: Settings, steps: int) -> float:
    """Seconds of processor time for so many whole steps."""
    machine = Machine(rules)
    began = time.process_time()
    for step in range(steps):
        ready_groups(machine, rules.groups, at=step)
        train(machine, step)
        machine.take()
    return time.process_time() - began


def test_memory_stays_flat_over_a_long_run() -> None:
    """58: what was trained is forgotten, trajectories too."""
    rules = settings(groups=64, group_size=1, eta=0, max_steps=10**6)
    machine = Machine(rules)
    sizes: list[int] = []
    tracemalloc.start()
    try:
        for step in range(120):
            ready_groups(machine, 64, at=step)
            train(machine, step)
            machine.workers.lapse(0.0)  # the ticker's part
            machine.take()
            if step in (39, 119):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 200_000
    assert machine.state.trained == 120 * 64 and plain(machine.state)["training"]["groups"] == {}


def test_a_step_costs_no_more_late_in_a_run_than_early() -> None:
    """No command looks at what is over: twice the steps take about twice the time."""
    rules = settings(groups=32, group_size=1, eta=0, max_steps=10**6)
    long_run(rules, 10)
    short, long = long_run(rules, 40), long_run(rules, 160)
    assert long < 4 * short * 2.5
