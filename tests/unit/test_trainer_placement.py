"""A role's tensors to the host and back: each stays the object that it is, and training goes on as if nothing was."""

import asyncio

import pytest
import torch

from async_rl.config.placement import placement_problems
from async_rl.errors import ConfigError
from async_rl.models.moving import move, tensors_of
from async_rl.rundir import RunDir
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.placement import Shared, tensors, turns
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.roles import Roles
from tests.unit.trainer_material import configuration, random_samples, tiny_llama


def shared(**tables):
    return configuration(**{"mode": "sync", "placement": "shared"} | tables)


def trained():
    config = shared()
    roles = Roles(Policy(tiny_llama(), config))
    roles.policy.update(random_samples(4), Objective.of(config))
    return roles, config


def test_moved_tensors_stay_the_same_objects_with_other_memory():
    roles, _ = trained()
    model = roles.policy.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [(t, t.data_ptr(), t.clone()) for t in tensors(roles) if t.numel()]
    assert len(before) > 2 * len(list(model.parameters()))  # gradients and the optimizer's state are among them
    move(tensors(roles), "cpu")
    after = [t for t in tensors(roles) if t.numel()]
    assert len(before) == len(after)
    for (old, place, value), new in zip(before, after, strict=True):
        assert new is old
        assert new.data_ptr() != place
        assert torch.equal(new, value)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_tensors_that_are_one_memory_stay_one():
    module = torch.nn.Module()
    module.one = torch.nn.Parameter(torch.arange(6.0))
    module.other = torch.nn.Parameter(module.one.data)
    module.register_buffer("third", module.one.data)
    move(tensors_of(module), "cpu")
    with torch.no_grad():
        module.one[0] = 7.0
    assert module.other[0] == module.third[0] == 7.0


def test_training_with_moves_between_updates_is_bit_equal_to_training_without():
    made = []
    for moves in (False, True):
        roles, config = trained()
        for _ in range(3):
            if moves:
                move(tensors(roles), "cpu")
            roles.policy.update(random_samples(4), Objective.of(config))
        made.append(roles)
    for ours, theirs in zip(tensors(made[0]), tensors(made[1]), strict=True):
        assert torch.equal(ours, theirs)


def test_the_device_stays_taken_after_an_error(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    roles, config = trained()

    async def in_thread(work):
        return work()

    async def main():
        mine, other = (Shared(config, run, lambda: roles, in_thread) for _ in range(2))
        async with mine.turn():
            pass
        async with other.turn():  # given back
            pass
        with pytest.raises(ZeroDivisionError):
            async with mine.turn():
                _ = 1 // 0
        assert not other._lock.try_take(alone=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"mode": "async"}, "mode 'async' (staleness.max = 2)"),
        ({"mode": "one-step"}, "mode 'one-step' (staleness.max = 1)"),
        ({"rollout": {"engine": {"kind": "transformers", "device": "cuda"}}}, "rollout.engine.device = 'cuda'"),
    ],
)
def test_what_cannot_share_is_refused(tables, said, tmp_path):
    config = shared(**tables)
    (problem,) = placement_problems(config)
    assert said in problem
    with pytest.raises(ConfigError):
        turns(config, RunDir(tmp_path), lambda: None, None)


def test_what_can_share_is_not():
    assert not list(placement_problems(shared()))
    assert not list(placement_problems(shared(mode="async", staleness={"max": 0})))
    assert not list(placement_problems(configuration(mode="async")))
