"""Checkpoints: what plain transformers loads, complete or absent, and no more than asked."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config.schema import Warmup
from async_rl.models.tiny import build_model, build_tokenizer
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy
from tests.unit.trainer_material import configuration, random_samples

SETTINGS = Warmup(characters="abcdefghi", hidden_size=16, layers=1, heads=2)


@pytest.fixture
def trained():
    """A policy after one update, and its tokenizer."""
    tokenizer, config = build_tokenizer(SETTINGS), configuration()
    policy = Policy(build_model(SETTINGS, tokenizer, seed=0), config)
    policy.update(random_samples(4), Objective.of(config))
    return policy, tokenizer


def test_plain_transformers_loads_a_checkpoint(tmp_path, trained):
    policy, tokenizer = trained
    folder = Checkpoints(tmp_path, keep=2).save(policy.model, tokenizer, 40)
    assert folder == tmp_path / "step-00000040"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    text = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([text("abc").input_ids])
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert "flash" not in (folder / "config.json").read_text()


def test_the_newest_stay_and_latest_names_the_last(tmp_path, trained):
    policy, tokenizer = trained
    (tmp_path / "step-00000999").mkdir()  # of an earlier run
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30, 30):
        checkpoints.save(policy.model, tokenizer, step)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [
        "step-00000020",
        "step-00000030",
        "step-00000999",
    ]
    assert (tmp_path / "latest").read_text().strip() == "step-00000030"


def test_an_interrupted_checkpoint_leaves_no_folder_of_its_name(tmp_path, trained):
    policy, _ = trained

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("no space left")

    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(policy.model, Broken(), 10)
    assert not (tmp_path / "step-00000010").exists() and not (tmp_path / "latest").exists()
