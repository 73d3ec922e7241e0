"""Stacks of experts, as they are published, by the names and matrices of a model's files."""

import pytest
import torch

from async_rl.models.folder import stored_shapes
from async_rl.services.rollout.experts import entries_as_stored, tensors_as_stored
from async_rl.weights.manifest import seal, views
from tests.flow.rollout_material import packed
from tests.unit.moe_material import tiny_moe
from tests.unit.test_rollout_engine import llama


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What transformers writes to the files of a mixture of experts."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("moe")
    tiny_moe().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert stored_shapes(folder) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return tensors


def same(made, stored):
    assert made.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in made.items())


def test_what_lies_in_a_slot_is_what_stands_in_the_files(stored):
    layout, data = packed(tiny_moe())
    entries = entries_as_stored(seal(layout, data, version=1, epoch=0).tensors, stored)
    same(dict(views(entries, data)), stored)


def test_live_tensors_are_what_stands_in_the_files(stored):
    live = {name: p.detach() for name, p in tiny_moe().named_parameters()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in live and "model.layers.0.mlp.experts.gate_up_proj" not in stored
    same(dict(tensors_as_stored(live.items(), stored)), stored)


def test_what_is_stored_as_it_is_published_stays():
    layout, data = packed(llama())
    entries = seal(layout, data, version=1, epoch=0).tensors
    assert entries_as_stored(entries, {entry.name for entry in entries}) == entries
    stacked = {"a.experts.gate_up_proj": torch.zeros(2, 4, 3)}
    assert list(tensors_as_stored(stacked.items(), stacked)) == list(stacked.items())
