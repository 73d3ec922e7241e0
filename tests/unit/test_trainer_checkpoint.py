"""Checkpoints: what plain transformers loads, complete or absent, and no more than asked."""

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config.schema import Warmup
from async_rl.errors import AsyncRLError, DeadlineExceeded
from async_rl.models.load import load_policy
from async_rl.models.tiny import build_model, build_tokenizer
from async_rl.protocol.buffer import Cursor
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import train_step
from async_rl.services.trainer.trained import weights_checksum
from tests.unit.trainer_material import configuration, drawn, random_samples, random_trajectory

SETTINGS = Warmup(characters="abcdefghi", hidden_size=16, layers=1, heads=2)


@pytest.fixture
def trained():
    """Roles whose policy had one update, its tokenizer, its settings."""
    tokenizer, config = build_tokenizer(SETTINGS), configuration(trainer={"learning_rate": 0.01, "warmup_steps": 3})
    roles = Roles(Policy(build_model(SETTINGS, tokenizer, seed=0), config))
    roles.policy.update(random_samples(4), Objective.of(config))
    return roles, tokenizer, config


def save(checkpoints, *what):
    """The folder, when it is whole."""
    checkpoints.save(*what)
    return checkpoints.finish()


def test_plain_transformers_loads_a_checkpoint(tmp_path, trained):
    roles, tokenizer, config = trained
    folder = save(Checkpoints(tmp_path, keep=2), roles, tokenizer, config, 40)
    assert folder == tmp_path / "step-00000040"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in roles.policy.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    text = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([text("abc").input_ids])
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert "flash" not in (folder / "config.json").read_text()


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, trained):
    roles, tokenizer, config = trained
    cursor = Cursor(1, 16, 20, [17, 19], {"train.0": "abc"})
    save(Checkpoints(tmp_path, keep=2), roles, tokenizer, config, 1, cursor)
    resumed = Checkpoints(tmp_path, keep=2).resume(config, config.model)
    assert resumed is not None
    assert resumed.state.version == 1 and resumed.state.cursor == cursor
    rates = []
    for other in (roles.policy, resumed.roles.policy):
        rates.append(
            [other.update(random_samples(4, seed=seed), Objective.of(config)).learning_rate for seed in (1, 2, 3)]
        )
    assert rates[0] == rates[1]
    assert weights_checksum(roles.policy.model) == weights_checksum(resumed.roles.policy.model)
    ours, theirs = roles.policy.optimizer_tensors(), resumed.roles.policy.optimizer_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_newest_stay_and_latest_names_the_last(tmp_path, trained):
    roles, tokenizer, config = trained
    for step in (10, 20, 30, 30):
        checkpoints = Checkpoints(tmp_path, keep=2)  # each time by another process
        save(checkpoints, roles, tokenizer, config, step)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step-00000020", "step-00000030"]
    assert checkpoints.versions == [20, 30]
    assert (tmp_path / "latest").read_text().strip() == "step-00000030"


def test_an_interrupted_checkpoint_leaves_no_folder_of_its_name(tmp_path, trained):
    roles, _, config = trained

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("no space left")

    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(roles, Broken(), config, 10)
    with pytest.raises(AsyncRLError, match="could not be written: no space"):
        checkpoints.finish()
    assert not (tmp_path / "step-00000010").exists() and not (tmp_path / "latest").exists()
    assert checkpoints.versions == []
    assert checkpoints.resume(config, config.model) is None


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, trained):
    """It has the weights and the optimizer of the moment at which it was asked for; the next one waits for it."""
    roles, tokenizer, config = trained
    writing = threading.Event()

    class Slow:
        def save_pretrained(self, folder):
            assert writing.wait(30)
            tokenizer.save_pretrained(folder)

    checkpoints = Checkpoints(tmp_path, keep=2)
    before = weights_checksum(roles.policy.model)
    moments = {name: value.clone() for name, value in roles.policy.optimizer_tensors().items()}
    checkpoints.save(roles, Slow(), config, 1)
    roles.policy.update(random_samples(4, seed=5), Objective.of(config))
    assert weights_checksum(roles.policy.model) != before
    assert checkpoints.versions == []
    writing.set()
    checkpoints.save(roles, tokenizer, config, 2)
    assert checkpoints.versions[0] == 1
    checkpoints.finish()
    resumed = checkpoints.load(1, config, config.model)
    assert weights_checksum(resumed.roles.policy.model) == before
    found = resumed.roles.policy.optimizer_tensors()
    assert found.keys() == moments.keys() and all(torch.equal(found[name], moments[name]) for name in moments)


def test_a_checkpoint_that_takes_too_long_is_said(tmp_path, trained):
    roles, _, config = trained
    writing = threading.Event()

    class Stuck:
        def save_pretrained(self, folder):
            assert writing.wait(30)

    checkpoints = Checkpoints(tmp_path, keep=2, limit_s=0.05)
    checkpoints.save(roles, Stuck(), config, 1)
    with pytest.raises(DeadlineExceeded, match=r"trainer\.checkpoint_s = 0\.05"):
        checkpoints.finish()
    writing.set()


def test_a_flipped_bit_is_noticed(tmp_path, trained):
    roles, tokenizer, config = trained
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = save(checkpoints, roles, tokenizer, config, 1) / "trainer" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AsyncRLError, match=r"__0_0\.distcp is not what was written"):
        checkpoints.load(1, config, config.model)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer/state.json", "trainer/__0_0.distcp"])
def test_what_is_damaged_is_put_aside_for_the_one_before(tmp_path, trained, file):
    roles, tokenizer, config = trained
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, roles, tokenizer, config, 1)
    path = save(checkpoints, roles, tokenizer, config, 2) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    resumed = checkpoints.resume(config, config.model)
    assert resumed is not None
    assert resumed.state.version == 1
    assert (tmp_path / "damaged-step-00000002").is_dir()


def test_the_roles_that_learn_beside_the_policy_go_on_too(tmp_path):
    """A critic and PRIME's reward model come back with their optimizers, and the coefficient of the KL."""
    tokenizer = build_tokenizer(SETTINGS)
    first = tmp_path / "first"
    build_model(SETTINGS, tokenizer, seed=0).save_pretrained(first)
    tokenizer.save_pretrained(first)
    for advantage in ("gae", "prime"):
        config = configuration(
            model={"path": str(first)},
            batch={"groups": 2, "group_size": 2},
            algorithm={
                "advantage": {"kind": advantage},
                "kl": {"coefficient": 0.1, "target": 0.01},
                "critic": {"learning_rate": 0.01},
            },
        )
        generator = np.random.default_rng(0)
        draws = [
            drawn([[(random_trajectory(generator), float(m)) for m in range(2)] for _ in range(2)], step=step)
            for step in range(4)
        ]
        roles = Roles.around(Policy(load_policy(config.model), config), config, config.model)
        for step in (0, 1):
            train_step(draws[step], roles, config)
        checkpoints = Checkpoints(tmp_path / advantage, keep=2)
        save(checkpoints, roles, tokenizer, config, 2)
        resumed = checkpoints.resume(config, config.model)
        assert resumed is not None and resumed.roles.kl == roles.kl != 0.1
        for one in (roles, resumed.roles):
            for step in (2, 3):
                figures = train_step(draws[step], one, config).figures
                assert all(np.isfinite(value) for value in figures.values())
        (ours,), (theirs,) = roles.beside().values(), resumed.roles.beside().values()
        assert weights_checksum(ours.model) == weights_checksum(theirs.model)
        assert weights_checksum(roles.policy.model) == weights_checksum(resumed.roles.policy.model)
