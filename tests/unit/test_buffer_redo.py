"""What a restart of the trainer or of the run finds again: draws, the data cursor, the tasks that were left."""

import pytest

from async_rl.buffers import events
from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import new_state
from async_rl.errors import AsyncRLError, ConfigError, JournalDamaged
from async_rl.protocol.buffer import Cursor
from tests.unit.buffer_material import Rotting, generate, grade, plain, ready_groups, rollout, settings, train


def test_a_restarted_trainer_gets_the_draws_of_the_steps_it_has_to_make_again():
    machine = Machine(settings(eta=2), store=Rotting())
    ready_groups(machine, 6, at=0)
    drawn = [train(machine, step) for step in range(3)]
    assert machine.trainer.begin(1, 0) == 3
    again = [machine.trainer.made(step, 1) for step in range(3)]
    assert [[group.group for group in draw.groups] for draw in again if draw is not None] == drawn
    assert machine.trainer.made(3, 1) is None


def test_a_draw_that_is_reused_is_made_again_at_each_of_its_steps():
    machine = Machine(settings(eta=2, reuse=2), store=Rotting())
    ready_groups(machine, 2, at=0)
    machine.trainer.begin(0, 0)
    for step in (0, 1):
        machine.trainer.draw(step, 0)
        machine.trainer.finish_step(step, 0)
    draws = [machine.trainer.made(step, 0) for step in (0, 1)]
    assert draws[0] is draws[1] is not None


@pytest.mark.parametrize("call", ["draw", "made", "finish_step", "checkpointed"])
def test_an_old_trainer_that_wakes_up_can_neither_draw_nor_commit(call):
    machine = Machine(settings(eta=2), store=Rotting())
    ready_groups(machine, 4, at=0)
    machine.trainer.begin(1, 0)
    machine.trainer.draw(0, 1)
    assert machine.trainer.begin(2, 0) == 0
    with pytest.raises(AsyncRLError, match="trainer epoch 1 is older than 2"):
        getattr(machine.trainer, call)(0, 1)
    assert machine.trainer.finish_step(0, 2) == 1


def test_steps_before_the_oldest_checkpoint_cannot_be_made_again():
    machine = Machine(settings(eta=3), store=Rotting())
    ready_groups(machine, 6, at=0)
    for step in range(3):
        train(machine, step)
    machine.trainer.checkpointed(2, 0)
    assert sorted(machine.state.draws) == [2]
    assert machine.trainer.begin(1, 2) == 3
    with pytest.raises(ConfigError, match="begins at version 1, but what step 1 was trained on is kept no more"):
        machine.trainer.begin(2, 1)


def test_a_checkpoint_that_is_ahead_of_the_journal_is_of_another_run():
    with pytest.raises(ConfigError, match="of version 4, but the journal ends at version 0"):
        Machine(settings()).trainer.begin(1, 4)


def test_after_a_resume_from_a_checkpoint_alone_admission_counts_what_was_trained():
    """Field report 1: eta = 2, B = 8, version 10, nothing running: capacity is 24, never 104."""
    machine = Machine(settings(groups=8, eta=2, max_steps=100))
    assert machine.trainer.begin(1, 10, Cursor(10, trained=80, position=80, again=[], data={})) == 10
    assert machine.state.capacity == 24
    machine.state.check()


def test_the_data_cursor_stands_at_what_was_trained():
    """Field report 49: ids 0..7, generation batch 4, train batch 2, checkpoint after [0, 1]: next are [2, 3]."""
    machine = Machine(settings(groups=2, eta=1, tasks=8))
    ready_groups(machine, 2, at=0)
    rollout(machine, 4, at=0)  # two more are under way
    assert [
        machine.state.training.groups[n].position for n in train(machine, 0) if n in machine.state.training.groups
    ] == []
    cursor = machine.trainer.cursor()
    assert cursor == Cursor(1, trained=2, position=4, again=[2, 3], data={})

    resumed = Machine(settings(groups=2, eta=1, tasks=8))
    resumed.trainer.begin(1, 1, cursor)
    positions = []
    while not isinstance(drawn := _next_draw(resumed), Ended):
        positions.append(drawn)
    assert positions == [[2, 3], [4, 5], [6, 7]]


def _next_draw(machine):
    version = machine.state.version
    for lease in rollout(machine, 4, at=version):
        generate(machine, lease, at=version)
    grade(machine)
    batch = machine.trainer.draw(version, 1)
    if not isinstance(batch, Ended):
        machine.trainer.finish_step(version, 1)
        return [group.position for group in batch.groups]
    return batch


def test_a_checkpoint_of_other_data_is_refused():
    machine = Machine(settings(data={"train.0": "a", "order": "x"}))
    with pytest.raises(ConfigError, match=r"not that of the checkpoint of version 3: train\.0 changed"):
        machine.trainer.begin(1, 3, Cursor(3, 6, 6, [], {"train.0": "b", "order": "x"}))
    assert machine.state.version == 0


def test_a_run_that_was_closed_too_early_is_opened_again_and_its_tasks_come_first():
    machine = Machine(settings(eta=1))
    ready_groups(machine, 4, at=0)
    train(machine, 0)
    machine.close("max_steps")
    assert machine.state.held == 0
    machine.go_on(settings(eta=1, max_steps=20), complete=False)
    assert machine.state.closed is None
    assert machine.settings.max_steps == 20
    leases = rollout(machine, 4, at=1)
    assert [machine.state.training.groups[lease.id.group].position for lease in leases] == [2, 3]
    machine.state.check()
    redone = new_state(settings(eta=1))
    for event in machine.take():
        redone.apply(event)
    assert plain(redone) == plain(machine.state)


def test_a_complete_run_stays_closed_when_its_buffer_is_started_anew():
    machine = Machine(settings())
    machine.close("max_steps")
    machine.take()
    machine.go_on(settings(), complete=True)
    assert machine.state.closed == "max_steps"
    assert machine.take() == []


def test_a_run_that_broke_goes_on_when_it_is_begun_again():
    machine = Machine(settings(max_failures=1))
    (lease, _) = rollout(machine, 4, at=0)
    machine.workers.fail("rollout-0", "i", lease.id, None, "no network", 0.0)
    assert machine.state.broken is not None
    machine.go_on(settings(max_failures=1), complete=False)
    assert machine.state.broken is None
    ready_groups(machine, 1, at=0)


def test_a_lower_eta_governs_what_is_admitted_from_here_on():
    machine = Machine(settings(eta=3))
    ready_groups(machine, 8, at=0)
    machine.go_on(settings(eta=1), complete=False)
    assert machine.state.eta == machine.settings.eta == 1
    assert {group.eta for group in machine.state.training.groups.values()} == {3}
    assert machine.state.capacity == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"groups": 4}, r"groups = 2, now it is 4"),
        ({"on_exceed": "drop"}, r"on_exceed = wait, now it is drop"),
        ({"data": {"train.0": "b"}}, r"the data is not that of this run: train\.0 changed"),
    ],
)
def test_what_decides_a_run_is_told_and_refused_when_it_goes_on(change, told):
    machine = Machine(settings())
    with pytest.raises(ConfigError, match=told):
        machine.go_on(settings(**change), complete=False)
    assert machine.take() == []


def test_a_damaged_trajectory_costs_its_member_alone():
    store = Rotting()
    machine = Machine(settings(), store=store)
    numbers = ready_groups(machine, 2, at=0)
    group = machine.state.training.groups[numbers[0]]
    store.rot(group.trajectories[1].place)
    assert isinstance(machine.trainer.draw(0, 0), Waiting)
    assert group.phase == "waiting"
    assert group.missing == [1]
    assert group.failures == 0
    assert [event.member for event in machine.take() if isinstance(event, events.Lost)] == [1]
    (lease,) = rollout(machine, 1, at=0)
    assert lease.open == [1]
    generate(machine, lease, at=0)
    grade(machine)
    assert train(machine, 0) == numbers


def test_a_trajectory_that_is_damaged_before_it_is_scored_is_generated_again():
    store = Rotting()
    machine = Machine(settings(), store=store)
    (lease, other) = rollout(machine, 4, at=0)
    generate(machine, lease, at=0)
    generate(machine, other, at=0)
    store.rot(machine.state.training.groups[lease.id.group].trajectories[0].place)
    scored = machine.workers.acquire("reward-0", "r", "score", 64, -1, 0.0)
    assert [lease.id.group for lease in scored] == [other.id.group]
    assert machine.state.training.groups[lease.id.group].phase == "waiting"


def test_damage_to_a_journalled_draw_stops_the_redo_and_nothing_else():
    store = Rotting()
    machine = Machine(settings(), store=store)
    numbers = ready_groups(machine, 2, at=0)
    place = machine.state.training.groups[numbers[0]].trajectories[0].place
    train(machine, 0)
    store.rot(place)
    machine.go_on(settings(), complete=False)  # the run itself needs it no more
    draw = machine.trainer.made(0, 1)
    assert draw is not None
    with pytest.raises(JournalDamaged):
        store.get(draw.groups[0].members[0].place)


def test_a_thousand_steps_leave_the_state_as_small_as_it_was():
    """Field report 58: what the buffer holds is bounded; it does not grow with the steps."""
    machine = Machine(settings(max_steps=10_000, eta=1))
    sizes = {}
    for step in range(2100):
        ready_groups(machine, 2, at=step)
        train(machine, step)
        if step % 10 == 0:
            machine.trainer.checkpointed(step, 0)
        machine.take()
        if step in (1050, 2099):
            state = machine.state
            sizes[step] = [len(x) for x in (state.over, state.training.groups, state.leases, state.draws)]
    assert sizes[1050][:3] == sizes[2099][:3]
    assert max(size[3] for size in sizes.values()) <= 11
