"""Evaluation: on exactly one version, outside of training's accounts. 12 is a field report."""

import pytest

from async_rl.buffers.evaluation import report
from async_rl.buffers.for_trainer import Ended
from async_rl.buffers.machine import Machine
from async_rl.errors import AsyncRLError
from async_rl.trajectory import Score, Task
from tests.unit.buffer_material import (
    generate,
    grade,
    ready_groups,
    rollout,
    settings,
    train,
)


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
    machine.workers.lapse(now=31.0)  # rollout-1 is silent for longer than lease_s
    leases = rollout(machine, 8, at=1, now=31.0)
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


def test_an_evaluation_that_only_waits_for_its_scores_does_not_start_again() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    for lease in rollout(machine, 3, at=0):
        generate(machine, lease, at=0)
    training = next(iter(machine.state.training.groups))
    (lease,) = [m for m in machine.workers.acquire("reward-1", "r", "score", 1, -1, 0.0) if m.id.group != training]
    grade(machine)  # all others
    train(machine, 0)
    assert all(lease.id.group >= 0 for lease in rollout(machine, 8, at=1))
    assert machine.state.evaluations[0].restarted == 0
    machine.workers.finish_score("reward-1", "r", lease.id, 0, Score(1.0), 0.0)
    done = machine.trainer.evaluation(0)
    assert done is not None and (done.version, done.restarted) == (0, 0)


def test_a_held_out_sample_never_scored_has_no_evaluation_start_again() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    for lease in rollout(machine, 3, at=0):
        generate(machine, lease, at=0)
    failed = machine.workers.acquire("reward-0", "r", "score", 1, -1, 0.0)[0]
    machine.workers.finish_score("reward-0", "r", failed.id, 0, Score(None, "failed"), 0.0)
    grade(machine)
    train(machine, 0)
    rollout(machine, 8, at=1)  # version 0, at which the sample would be made again, is gone
    done = machine.trainer.evaluation(0)
    assert done is not None and (done.version, done.restarted) == (0, 0)
    assert [mark.reward for _, marks in sorted(done.marks.items(), reverse=True) for mark in marks] == [1.0, None]


def test_a_held_out_task_that_always_fails_has_the_others_sampled_again_once() -> None:
    machine = evaluating()
    machine.trainer.evaluate(0)
    for version in range(3):
        for lease in rollout(machine, 3, at=version):
            if machine.state.pool(lease.id.group).groups[lease.id.group].position == 0 and lease.id.group < 0:
                machine.workers.fail("rollout-0", "i", lease.id, None, "the prompt is too long", 0.0)
            else:
                generate(machine, lease, at=version)
        grade(machine)
        train(machine, version)
    done = machine.trainer.evaluation(0)
    assert done is not None and (done.version, done.restarted) == (1, 1)


def test_an_evaluation_without_a_vote_has_no_score() -> None:
    machine = evaluating(max_failures=1)
    machine.trainer.evaluate(0)
    for lease in rollout(machine, 2, at=0):
        machine.workers.fail("rollout-0", "i", lease.id, None, "engine died", 0.0)
    done = machine.trainer.evaluation(0)
    assert done is not None
    tasks = [Task(index=i, source="words", prompt="p") for i in range(2)]
    report_of = report(done, tasks)
    assert (report_of.mean_reward, report_of.voting, report_of.samples) == (None, 0, 2)
    assert report_of.sources["words"].mean_reward is None


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
