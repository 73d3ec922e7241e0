"""The memory that a run takes, with the roles that its algorithm brings along."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from async_rl.config import parse
from async_rl.config.memory import estimate

COUNT = 1000


@pytest.mark.parametrize(
    ("algorithm", "learning", "frozen"),
    [
        ({}, 1, 0),
        ({"advantage": "gae"}, 2, 0),
        ({"kl": {"coefficient": 0.1}}, 1, 1),
        ({"advantage": "prime", "kl": {"coefficient": 0.1}}, 2, 1),  # they share the reference
        ({"kl": {"coefficient": 0.1}, "teacher": {"path": "other"}}, 1, 2),
    ],
)
def test_each_role_is_counted(tmp_path: Path, algorithm: dict[str, object], learning: int, frozen: int) -> None:
    save_file({"w": torch.zeros(COUNT)}, tmp_path / "model.safetensors")
    config = parse(
        {
            "name": "run",
            "model": {"path": str(tmp_path)},
            "data": {"train": [{"kind": "jsonl", "path": "none"}]},
            "max_steps": 4,
            "algorithm": algorithm,
        }
    )
    found = estimate(config)
    assert found is not None and found.parameters == COUNT
    assert found.trainer == learning * 16 * COUNT + frozen * 4 * COUNT
    assert found.slots == 3 * 4 * COUNT and found.rollouts == 4 * COUNT
