"""The shipped recipes from nothing to a trained policy: `make test-slow`."""

import json
from pathlib import Path

import pytest

from tests.flow import ring

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PRESETS = sorted((RECIPES / "algorithms").glob("*.toml"))


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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("files", "name", "before", "after"),
    [
        (["agents/calculator.toml"], "calculator", 0.4, 0.6),
        (["agents/calculator.toml", "agents/openai_agent.toml"], "openai_agent", 0.4, 0.6),
        (["agents/files.toml"], "files", 0.3, 0.5),
        (["countdown/laptop.toml"], "countdown", 0.25, 0.29),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_of_agents_learns(tmp_path: Path, files: list[str], name: str, before: float, after: float) -> None:
    (tmp_path / "recipes").symlink_to(RECIPES)  # modules and data are named from the repository's root
    status, output = ring.run("train", *(f"recipes/{file}" for file in files), cwd=tmp_path, timeout=1700)
    assert status == 0, output
    summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    assert summary["held_out"]["before"] < before
    assert summary["held_out"]["after"] >= after
    assert summary["groups"]["conserved"]
    assert ring.left_over(tmp_path) == []


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart's model is ready."""
    folder = tmp_path_factory.mktemp("presets")
    status, output = ring.run("warmup", str(RECIPES / "quickstart.toml"), cwd=folder, timeout=300)
    assert status == 0, output
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_runs_on_the_quickstart(warm: Path, preset: Path) -> None:
    settings = ("max_steps=5", f"name={preset.stem}", "evaluation.every=0", "data.held_out_size=64")
    status, output = ring.run("train", str(RECIPES / "quickstart.toml"), str(preset), *settings, cwd=warm)
    assert status == 0, output
    summary = json.loads((warm / "runs" / preset.stem / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["groups"]["conserved"] and summary["skipped_updates"] == 0
    lines = (warm / "runs" / preset.stem / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["kind"] == "step"]
    assert sum(record["gradient_norm"] > 0 for record in steps) >= 3
