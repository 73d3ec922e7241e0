"""Settings of a trainer's ranks that cannot be."""

import pytest

from async_rl.config.ranks import first_remote, rank_problems
from async_rl.config.schema import LoRA
from tests.unit.trainer_material import configuration


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"ranks": 3, "sequence_parallel": 2}, "ranks are a multiple of 2"),
        ({"ranks": 6, "sequence_parallel": 2, "tensor_parallel": 2}, "does not divide trainer.ranks = 6"),
        ({"ranks": 2, "local_ranks": 3}, "there are trainer.ranks = 2"),
        ({"ranks": 2, "rendezvous": "somewhere"}, "HOST:PORT"),
        ({"ranks": 2, "rendezvous": "host:99999"}, "HOST:PORT"),
    ],
)
def test_they_are_said_with_what_fits(trainer, said):
    (problem,) = rank_problems(configuration(trainer=trainer))
    assert said in problem


def test_ranks_elsewhere_need_a_place_to_meet_and_a_way_for_the_weights():
    shared = {"ranks": 4, "local_ranks": 2}
    problems = list(rank_problems(configuration(trainer=shared)))
    assert "trainer.rendezvous" in problems[0] and "weight_sync.transport = 'shm'" in problems[1]
    fit = configuration(trainer={**shared, "rendezvous": "10.0.0.1:29500"}, weight_sync={"transport": "collective"})
    assert not list(rank_problems(fit))
    assert first_remote(fit) == 2


def test_adapters_are_not_cut():
    config = configuration(trainer={"ranks": 2, "tensor_parallel": 2}, model={"path": "none", "lora": {}})
    assert config.model.lora == LoRA()
    (problem,) = rank_problems(config)
    assert "model.lora" in problem


@pytest.mark.parametrize("ranks", [{}, {"ranks": 8}, {"ranks": 8, "sequence_parallel": 4, "tensor_parallel": 2}])
def test_what_fits_is_left_alone(ranks):
    assert not list(rank_problems(configuration(trainer=ranks)))
