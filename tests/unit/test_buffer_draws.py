"""Draws, the end of the data and of the run, the table of groups, and what a long run costs."""

import gc
import re
import time
import tracemalloc

import pytest

from async_rl.buffers import report
from async_rl.buffers.for_trainer import Ended
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.errors import AsyncRLError
from tests.unit.buffer_material import (
    generate,
    plain,
    ready_groups,
    rollout,
    settings,
    train,
    trajectory,
)

ALONE = {"groups": 1, "group_size": 1}


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


def long_run(rules: Settings, steps: int) -> float:
    """Seconds of processor time for so many whole steps, without passes over what other tests left in memory."""
    machine = Machine(rules)
    gc.disable()
    began = time.process_time()
    try:
        for step in range(steps):
            ready_groups(machine, rules.groups, at=step)
            train(machine, step)
            machine.take()
        return time.process_time() - began
    finally:
        gc.enable()


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
    short, long = (min(long_run(rules, steps) for _ in range(3)) for steps in (40, 160))
    assert long < 4 * short * 2.5
