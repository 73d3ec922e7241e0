"""Whole runs of the pure machine in simulated time: every mode reaches its end and keeps its promise."""

import random

import pytest
from msgspec import structs

from async_rl.buffers.settings import Settings
from async_rl.buffers.state import new_state
from tests.unit.buffer_material import plain, settings
from tests.unit.buffer_ring import ring

SET_UPS = 60  # per policy


def random_rules(dice: random.Random, on_exceed: str) -> Settings:
    reuse = dice.choice((1, 1, 1, 2, 3))
    eta = reuse - 1 + dice.choice((0, 1, 2, 4))
    size = dice.choice((1, 2, 4))
    return settings(
        groups=dice.choice((1, 2, 3, 5)),
        group_size=size,
        min_valid=dice.randint(1, size),
        eta=eta,
        reuse=reuse,
        on_exceed=on_exceed,
        hard_max=eta + dice.choice((0, 2)) if on_exceed == "correct" else None,
        in_flight=on_exceed == "mask" or dice.random() < 0.5,
        max_steps=dice.choice((3, 7, 12)),
        tasks=dice.choice((None, None, 10)),
        lease_s=8.0,
    )


@pytest.mark.parametrize("on_exceed", ["wait", "drop", "mask", "correct"])
def test_every_run_without_failures_reaches_its_end_within_the_bound(on_exceed: str) -> None:
    for seed in range(SET_UPS):
        dice = random.Random(f"{on_exceed} {seed}")
        rules = random_rules(dice, on_exceed)
        run = ring(rules, seed, sigma=dice.choice((0.0, 0.5, 1.5)), workers=dice.choice((1, 2, 3)))
        ended = run.run(limit=20_000)
        state = run.machine.state
        state.check()
        if rules.tasks is None:
            assert ended.startswith("max_steps"), (seed, ended)
            assert state.version == rules.max_steps
        if on_exceed in ("wait", "correct"):
            assert state.dropped == {} and state.failed == {}, (seed, state.dropped, state.failed)


@pytest.mark.parametrize("on_exceed", ["wait", "drop", "mask", "correct"])
def test_runs_with_failures_lapses_and_deaths_go_on_and_conserve_their_groups(on_exceed: str) -> None:
    for seed in range(SET_UPS):
        dice = random.Random(f"faults {on_exceed} {seed}")
        rules = random_rules(dice, on_exceed)
        rules = structs.replace(rules, max_failures=1000)
        run = ring(rules, seed, sigma=0.8, workers=dice.choice((1, 2, 3)), faults=0.05)
        run.run(limit=50_000)
        state = run.machine.state
        state.check()
        if rules.tasks is None:
            assert state.version == rules.max_steps


def test_groups_that_fail_for_good_give_their_places_back() -> None:
    failed = 0
    for seed in range(SET_UPS):
        dice = random.Random(f"give back {seed}")
        rules = random_rules(dice, dice.choice(("wait", "drop", "mask")))
        rules = structs.replace(rules, tasks=None, max_failures=2)
        run = ring(rules, seed, sigma=0.5, faults=0.1)
        run.machine.end_broken = lambda reason: None  # type: ignore[method-assign]
        run.run(limit=50_000)
        assert run.machine.state.version == rules.max_steps
        failed += sum(run.machine.state.failed.values())
    assert failed > SET_UPS  # else the runs show nothing


def test_the_events_of_a_run_give_its_state_again() -> None:
    for seed, on_exceed in enumerate(("wait", "drop", "mask", "correct") * 3):
        dice = random.Random(f"redo {seed}")
        rules = random_rules(dice, on_exceed)
        rules = structs.replace(rules, max_failures=1000)
        run = ring(rules, seed, faults=0.05, keep_events=True)
        run.run(limit=50_000)
        run.machine.close("done")
        redone = new_state(rules)
        for event in [*run.log, *run.machine.take()]:
            redone.apply(event)
        assert plain(redone) == plain(run.machine.state)
