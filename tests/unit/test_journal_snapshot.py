"""A state frozen and thawed is the same state, with the same objects shared."""

import random

from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from async_rl.buffers.group import Place
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.snapshot import freeze, thaw
from async_rl.buffers.state import State
from async_rl.buffers.store import KeptDraw
from async_rl.errors import AsyncRLError
from async_rl.trajectory import Trajectory
from tests.unit.buffer_material import generate, grade, plain, rollout, settings
from tests.unit.buffer_ring import Ring, RingWorker


class Shelf:
    """A store whose places say nothing but where, as those of a journal on disk."""

    def __init__(self) -> None:
        self.content: list[Trajectory | KeptDraw] = []

    def put(self, group: int, member: int, trajectory: Trajectory) -> Place:
        self.content.append(trajectory)
        return Place(1, len(self.content) - 1, 1)

    def get(self, place: Place) -> Trajectory:
        found = self.content[place.offset]
        assert isinstance(found, Trajectory)
        return found

    def put_draw(self, draw: KeptDraw) -> Place:
        self.content.append(draw)
        return Place(1, len(self.content) - 1, 1)

    def get_draw(self, place: Place) -> KeptDraw:
        found = self.content[place.offset]
        assert isinstance(found, KeptDraw)
        return found


def rules() -> st.SearchStrategy[Settings]:
    def sensible(**drawn: object) -> Settings:
        chosen = settings(**drawn)
        return settings(**{**drawn, "eta": max(chosen.eta, chosen.reuse - 1)})

    return st.builds(
        sensible,
        groups=st.integers(1, 3),
        group_size=st.integers(1, 3),
        eta=st.integers(0, 3),
        reuse=st.integers(1, 2),
        on_exceed=st.sampled_from(["wait", "drop", "mask"]),
        max_steps=st.integers(1, 8),
        held_out=st.integers(0, 2),
    )


def assert_comes_back(state: State) -> None:
    again = thaw(freeze(state))
    assert plain(again) == plain(state)
    for group in [*again.training.groups.values(), *again.held_out.groups.values()]:
        if group.lease is not None:
            assert again.leases[group.lease.id] is group.lease
    if again.batch is not None:
        for group in again.batch.groups:
            held = again.find(group.id)
            assert held is None or held is group


@profile(max_examples=60, deadline=None)
@given(rules(), st.integers(0, 2**32), st.integers(1, 60), st.floats(0.0, 0.3))
def test_any_state_of_a_ring_comes_back(rules: Settings, seed: int, ticks: int, faults: float) -> None:
    dice = random.Random(seed)
    machine = Machine(rules, store=Shelf())
    workers = [RingWorker(f"rollout-{i}", rules.group_size * 2, 1.0) for i in range(2)]
    ring = Ring(machine, dice, workers, faults=faults)
    if rules.held_out and dice.random() < 0.5:
        machine.trainer.evaluate(0)
    for _ in range(4):
        try:
            ring.run(limit=ring.now + ticks)
        except AssertionError as error:  # the ring has not ended, as it seldom has by then
            assert "no end" in str(error)
        except AsyncRLError as error:  # too many faults: the run broke
            assert str(error) == machine.state.broken
        assert_comes_back(machine.state)
    machine.close("the test is over")
    assert_comes_back(machine.state)


def test_a_thawed_state_goes_on_as_the_frozen_one_would() -> None:
    """A lease reached through the group and through the table is one lease."""
    rules, shelf = settings(groups=1, group_size=2, eta=2), Shelf()
    machine = Machine(rules, store=shelf)
    first, _ = rollout(machine, 4, at=0)
    generate(machine, first, at=0, members=1)
    machines = [machine, Machine(rules, thaw(freeze(machine.state)), store=shelf)]
    for each in machines:
        for lease in list(each.state.leases.values()):
            generate(each, lease, at=0)
        grade(each)
        each.trainer.draw(0, 0)
        each.trainer.finish_step(0, 0)
    one, other = machines[0].state, machines[1].state
    assert one.trained == other.trained == 1
    assert {key: over.how for key, over in one.over.items()} == {key: over.how for key, over in other.over.items()}
    other.check()


def test_groups_that_ended_stay_in_a_draw_that_is_used_again() -> None:
    machine = Machine(settings(groups=1, group_size=1, eta=1, reuse=2), store=Shelf())
    for lease in rollout(machine, 1, at=0):
        generate(machine, lease, at=0)
    grade(machine)
    machine.trainer.draw(0, 0)
    machine.trainer.finish_step(0, 0)
    assert machine.state.batch is not None
    assert not machine.state.find(machine.state.batch.groups[0].id)
    assert_comes_back(machine.state)
