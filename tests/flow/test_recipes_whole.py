"""The shipped recipes from nothing to a trained policy: `make test-slow`."""

import json
from pathlib import Path

import pytest

from tests.flow import ring

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        ("quickstart", 0.4, 0.7),
        ("smollm2_arithmetic", 0.05, 0.3),  # 0.38 to 0.44 as measured; the curve is noisy
    ],
)
def test_a_recipe_learns(tmp_path: Path, recipe: str, before: float, after: float) -> None:
    status, output = ring.run("train", str(RECIPES / f"{recipe}.toml"), cwd=tmp_path, timeout=1700)
    assert status == 0, output
    summary = json.loads((tmp_path / "runs" / recipe / "summary.json").read_text())
    assert summary["held_out"]["before"] < before
    assert summary["held_out"]["after"] >= after
    assert summary["groups"]["conserved"]
    assert summary["largest_lag_trained"] <= summary["eta"]
    assert ring.left_over(tmp_path) == []
