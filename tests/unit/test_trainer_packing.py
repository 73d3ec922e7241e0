"""Micro-batches: no padding, nothing lost, a fixed order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import InvariantError
from async_rl.services.trainer.masks import Masked
from async_rl.services.trainer.packing import first_fit_decreasing, pack, packs
from async_rl.services.trainer.samples import samples_of
from tests.unit.trainer_material import random_samples, sample, trajectory


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 50))
def test_every_sequence_is_in_one_bin_and_no_bin_is_overfull(lengths, capacity):
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(p for members in bins for p in members) == list(range(len(lengths)))
    for members in bins:
        assert len(members) == 1 or sum(lengths[p] for p in members) <= capacity
        assert members == sorted(members)
    assert bins == sorted(bins) == first_fit_decreasing(lengths, capacity)


def test_first_fit_decreasing_fills_what_first_fit_would_leave():
    assert first_fit_decreasing([5, 3, 5, 7], 10) == [[0, 2], [1, 3]]


def test_a_longer_sequence_has_a_bin_of_its_own():
    assert first_fit_decreasing([50, 2, 3], 10) == [[0], [1, 2]]


def test_a_pack_is_one_row_with_each_prompt_once():
    row = pack(
        [
            sample(trajectory([1, 2], [3, 4, 5])),
            sample(trajectory([6], [7, 8])),
            sample(trajectory([1, 2], [9, 3])),
        ]
    )
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 9, 6, 7]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert row.input_ids[0, row.expand].tolist() == [1, 2, 3, 4, 1, 2, 9, 6, 7]
    assert row.expand[row.collapse].tolist() == list(range(7))
    assert row.cu_seq_lens.tolist() == [0, 4, 7, 9] and row.cu_seq_lens.dtype == torch.int32
    assert row.max_length == 4
    assert row.targets.tolist() == [3, 4, 5, 9, 3, 7, 8]
    assert row.predict.tolist() == [1, 2, 3, 1, 4, 5, 6]
    assert row.sequence.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_a_completion_of_one_token_is_predicted_by_the_prompt_alone():
    row = pack([sample(trajectory([1, 2], [3])), sample(trajectory([1, 2], [4]))])
    assert row.input_ids.tolist() == [[1, 2]]
    assert row.predict.tolist() == [1, 1] and row.targets.tolist() == [3, 4]


def test_a_group_too_large_for_one_row_is_cut_and_keeps_its_prompt_in_each_part():
    group = [sample(trajectory([1, 2, 3], [4, 5, 6])) for _ in range(5)]
    made = packs(group, 8)
    assert [p.sequences for p in made] == [2, 2, 1]
    assert all(p.input_ids[0, :3].tolist() == [1, 2, 3] for p in made)


def test_packs_hold_all_action_tokens_once():
    samples = random_samples(20)
    made = packs(samples, 30)
    assert sum(p.sequences for p in made) == 20
    assert sum(len(p.targets) for p in made) == sum(len(s.action) for s in samples)
    assert all(p.input_ids.shape[1] <= 30 for p in made)


def test_an_action_that_nothing_predicts_is_an_error():
    t = trajectory([], [1, 2])
    everything = Masked(torch.ones(2, dtype=torch.bool).numpy(), torch.zeros(2).numpy(), {})
    with pytest.raises(InvariantError, match="nothing predicts it"):
        samples_of(t, everything)


def test_survivors_of_all_or_of_none():
    with_them = sample(trajectory([1], [2], survivors=torch.tensor([[2, 3]]).numpy()))
    wider = sample(trajectory([1], [4], survivors=torch.tensor([[4, 5, 6]]).numpy()))
    row = pack([with_them, wider])
    assert row.survivors is not None and row.survivors.tolist() == [[2, 3, -1], [4, 5, 6]]
    with pytest.raises(InvariantError, match="some have not"):
        pack([with_them, sample(trajectory([1], [2]))])


def test_a_sampled_token_must_be_among_its_survivors():
    t = trajectory([1], [2], survivors=torch.tensor([[3, -1]]).numpy())
    everything = Masked(torch.ones(1, dtype=torch.bool).numpy(), torch.zeros(1).numpy(), {})
    with pytest.raises(InvariantError, match="not among the survivors"):
        samples_of(t, everything)
