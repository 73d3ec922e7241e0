"""Field report 50: the schedule counts optimizer updates, and their total is known before the first."""

from itertools import pairwise

import pytest

from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.schedule import learning_rate, total_updates
from tests.unit.trainer_material import configuration, random_samples, tiny_llama


def rates(schedule, total=10, **settings):
    trainer = configuration(trainer={"learning_rate": 1.0, "schedule": schedule, **settings}).trainer
    return [learning_rate(update, total, trainer) for update in range(total)]


def test_the_total_counts_mini_batches_and_epochs():
    assert total_updates(configuration(max_steps=5, batch={"groups": 6, "mini_batches": 3, "epochs": 2})) == 30


def test_warm_up_rises_in_a_line_to_the_peak():
    assert rates("constant", warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_falls_towards_the_minimum():
    made = rates("linear", warmup_steps=2, min_learning_rate=0.2)
    assert made[2] == 1.0
    assert made[-1] == pytest.approx(0.2 + 0.8 / 8)
    assert all(a > b for a, b in pairwise(made[2:]))


def test_cosine_is_half_way_in_the_middle():
    assert rates("cosine")[5] == pytest.approx(0.5)
    assert rates("cosine")[0] == 1.0


def test_an_update_uses_its_own_rate():
    config = configuration(trainer={"learning_rate": 1.0, "schedule": "linear", "warmup_steps": 1}, max_steps=5)
    policy = Policy(tiny_llama(), config)
    used = [policy.update(random_samples(2), Objective.of(config)).learning_rate for _ in range(3)]
    assert used == pytest.approx([1.0, 1.0, 0.75])
