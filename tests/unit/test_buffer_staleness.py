"""The bound on staleness, at admission and at the draw. Numbers in docstrings are field reports, tested with
the values they gave."""

import random

import pytest

from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.state import Batch, new_state
from async_rl.config.schema import Batch as BatchSettings
from async_rl.config.schema import Config, Data, JsonLines, Model, Sampling, Staleness
from async_rl.protocol.buffer import GenerateLease, LeaseId, WorkerStats
from async_rl.services.rollout.held import seed_of
from async_rl.trajectory import Task
from tests.unit.buffer_material import (
    generate,
    grade,
    ready_groups,
    rollout,
    settings,
    train,
    trajectory,
)
from tests.unit.buffer_ring import Ring, RingWorker, ring

ALONE = {"groups": 1, "group_size": 1}


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


def seeds(run: Ring) -> list[list[int]]:
    """Of every trajectory of every step, as a rollout seeds it in a run of seed 7."""
    return [
        [
            seed_of(7, GenerateLease(LeaseId(0, attempt, "generate"), task, members, Sampling(), [], 0, None), member)
            for position, attempt, members in groups
            for task in [Task(index=position, source="numbers", prompt="?")]
            for member in members
        ]
        for groups in run.drawn
    ]


def test_a_seeded_async_run_at_0_samples_what_a_sync_run_samples() -> None:
    """3: whatever the workers and their pace, each step has the same samples by the same seeds at its version."""
    runs = []
    for pace, (mode, bound) in enumerate((("sync", None), ("async", 0))):
        config = Config(
            name="x",
            model=Model(path="none"),
            data=Data(train=[JsonLines(path="none.jsonl")]),
            max_steps=12,
            mode=mode,  # type: ignore[arg-type]
            staleness=Staleness(max=bound),
            batch=BatchSettings(groups=4, group_size=3),
        )
        runs.append(ring(Settings.of(config, tasks=None, held_out=0), pace, workers=1 + 2 * pace, sigma=1.5))
        runs[-1].run(limit=5000)
    sync, at_0 = runs
    assert at_0.machine.settings.in_flight and not sync.machine.settings.in_flight
    assert seeds(sync) == seeds(at_0) and len(seeds(sync)) == 12
    assert len({seed for step in seeds(sync) for seed in step}) == 12 * 4 * 3
    assert sync.max_lag == at_0.max_lag == 0


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
def test_lag_exactly_at_the_bound_is_accepted_and_one_more_refused(bound: int, lag: int, accepted: bool) -> None:
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
    mixed = machine.workers.finish_generate("rollout-0", "i", lease.id, 0, trajectory((2, 1), (4, 1), (6, 1)), 0.0)
    assert mixed.outcome == "refused" and "mixes the versions [2, 4, 6]" in mixed.reason
    generate(machine, lease, at=6)
    (again,) = rollout(machine, 2, at=6)
    assert again.open == [0] and again.id == LeaseId(6, 1, "generate")


def test_rollouts_that_come_early_for_the_next_step_are_kept() -> None:
    """11: admission looks at versions alone; while step 0 is trained, groups for step 1 finish and stay."""
    machine = Machine(settings(groups=1, group_size=1, eta=2))
    first, early = rollout(machine, 2, at=0)
    generate(machine, first, at=0)
    grade(machine)
    batch = machine.trainer.draw(0, 0)
    assert isinstance(batch, Batch) and [group.id for group in batch.groups] == [0]
    generate(machine, early, at=0)
    assert ready_groups(machine, 1, at=0) == [2]  # admitted, sampled and graded while the step is under way
    assert machine.state.training.count("ready") == 2
    machine.trainer.finish_step(0, 0)
    assert [train(machine, step) for step in (1, 2)] == [[1], [2]]
    assert machine.state.dropped == {}


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
