"""Rows over the ranks that share them; the exchanges themselves are in tests/flow/test_trainer_ranks.py."""

import pytest
import torch

from async_rl.errors import UserError
from async_rl.services.trainer.packing import pack
from async_rl.services.trainer.sequence import part_of, require_heads
from tests.unit.trainer_material import random_samples, tiny_llama


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_and_every_prediction_is_on_one_rank(seed, ranks):
    row = pack(random_samples(4, seed=seed))
    parts = [part_of(row, rank, ranks) for rank in range(ranks)]
    tokens = row.input_ids.shape[1]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined[:, :tokens], getattr(row, name)) and not joined[:, tokens:].any()
    assert len({part.input_ids.shape for part in parts}) == 1
    assert torch.cat([part.own for part in parts]).sort().values.tolist() == list(range(len(row.predict)))
    for rank, part in enumerate(parts):
        width = part.input_ids.shape[1]
        assert torch.equal(part.predict + rank * width, row.predict[part.own])
        assert ((part.predict >= 0) & (part.predict < width)).all()


def test_heads_that_cannot_be_shared_are_refused_with_what_can():
    require_heads(tiny_llama(), 4)  # 4 heads, 2 of keys and values
    with pytest.raises(UserError, match=r"sequence_parallel = 3: 4 heads, and 2 .* one of \[1, 2, 4\]"):
        require_heads(tiny_llama(), 3)
