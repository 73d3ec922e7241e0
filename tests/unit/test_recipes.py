"""Every shipped recipe parses, has consistent numbers, and its data gives tasks; its page does too."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rl.agents.processes import Processes
from async_rl.agents.tools import named
from async_rl.cli.check import facts
from async_rl.config import bounds, load, parse
from async_rl.config.consistency import algorithm_problems
from async_rl.config.schema import ToolLoop
from async_rl.data import TaskStream, held_out_tasks
from async_rl.data import check as check_data
from async_rl.models import prepare
from async_rl.models.played import played
from async_rl.models.tiny import build_tokenizer, check_shape, missing_characters
from async_rl.models.warmup import demonstrations

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PRESETS = sorted((ROOT / "recipes" / "algorithms").glob("*.toml"))
AGENTS = [[path] for path in sorted((ROOT / "recipes").glob("*/*.toml")) if "max_steps" in path.read_text()]
AGENTS.append([ROOT / "recipes" / "agents" / name for name in ("calculator.toml", "openai_agent.toml")])
WARMED_UP = [path for path in RECIPES if load(path).warmup is not None]


@pytest.fixture(params=RECIPES, ids=[path.stem for path in RECIPES])
def recipe(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_are_recipes() -> None:
    assert {"quickstart", "smollm2_arithmetic"} <= {path.stem for path in RECIPES}


def test_a_recipe_parses_and_its_numbers_agree(recipe: Path) -> None:
    config = load(recipe)
    bounds(config)
    prepare.check_exclusive(config)
    assert config.name == recipe.stem


@pytest.mark.parametrize("files", AGENTS, ids=lambda files: files[-1].stem)
def test_a_recipe_of_agents_is_a_run(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # its modules and data are named from here
    config = load(files[0], [str(path) for path in files[1:]])
    bounds(config)
    prepare.check_exclusive(config)
    check_data(config.data)
    if config.warmup is not None:
        tokenizer = build_tokenizer(config.warmup)
        examples = played(config, tokenizer, demonstrations(config)[:50])
        assert all(sum(example.learned or ()) >= 2 for example in examples)
    if config.environment is not None and isinstance(config.environment.run, ToolLoop):
        assert len(named(config.environment.run.functions, Processes(1))) == len(config.environment.run.functions)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_goes_with_the_quickstart(preset: Path) -> None:
    config = load(ROOT / "recipes" / "quickstart.toml", [str(preset), "seed=3"])
    assert list(algorithm_problems(config)) == []
    assert config.name == "quickstart" and config.seed == 3
    changed = tomllib.loads(preset.read_text())["algorithm"]
    for table in ("advantage", "loss"):
        if table in changed:
            assert getattr(config.algorithm, table).kind == changed[table]["kind"]
            (told,) = [line for line in facts(config) if line.startswith("algorithm: ")]
            assert changed[table]["kind"] in told


def test_every_preset_that_is_promised_is_there() -> None:
    promised = "grpo dr_grpo dapo ppo rloo reinforce++ remax gspo cispo sapo gmpo opo gpg dppo clip_cov kl_cov"
    assert {*promised.split(), "prime", "maxrl", "topr"} <= {path.stem for path in PRESETS}


def test_the_data_of_a_recipe_gives_its_tasks(recipe: Path) -> None:
    config = load(recipe)
    check_data(config.data)
    first = TaskStream(config.data, config.seed).task(0)
    assert first.text
    assert first.answer
    assert (first.prompt is None) == (config.data.format == "chat")


def test_a_recipe_is_judged_on_256_tasks_that_are_never_trained(recipe: Path) -> None:
    config = load(recipe)
    held_out = {task.text for task in held_out_tasks(config.data)}
    stream = TaskStream(config.data, config.seed)
    assert config.data.held_out_size == 256
    assert not held_out & {stream.task(position).text for position in range(500)}


@pytest.mark.parametrize("path", WARMED_UP, ids=lambda path: path.stem)
def test_a_warm_up_reads_every_task_of_its_recipe(path: Path) -> None:
    config = load(path)
    assert config.warmup is not None
    check_shape(config.warmup)
    assert demonstrations(config)
    held_out = held_out_tasks(config.data)
    assert not missing_characters(config.warmup.characters, (t.text + (t.answer or "") for t in held_out))
    longest = max(len(t.text) for t in held_out)
    assert longest + config.sampling.max_new_tokens <= config.warmup.context


def test_a_recipe_has_its_page(recipe: Path) -> None:
    page = (ROOT / "docs" / recipe.relative_to(ROOT)).with_suffix(".md")
    assert f"async-rl train {recipe.relative_to(ROOT)}" in page.read_text(encoding="utf-8")


def test_the_page_of_a_recipe_shows_data_that_work(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are written to the file that the TOML names; the recipe with that TOML over it gives its tasks."""
    text = (ROOT / "docs" / recipe.relative_to(ROOT)).with_suffix(".md").read_text(encoding="utf-8")
    (rows,), (shown,) = (re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S) for kind in ("json", "toml"))
    config = parse(_over(tomllib.loads(recipe.read_text(encoding="utf-8")), tomllib.loads(shown)))
    monkeypatch.chdir(tmp_path)
    Path(config.data.train[0].path).write_text(rows)  # type: ignore[union-attr]
    check_data(config.data)
    assert held_out_tasks(config.data)
    if config.warmup is not None:
        prepare.check(config)


def _over(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = [key for key in changes if isinstance(changes[key], dict) and isinstance(tree.get(key), dict)]
    return {**tree, **changes, **{key: _over(tree[key], changes[key]) for key in both}}
