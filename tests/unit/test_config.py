import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import bounds, load, parse
from async_rl.config.algorithms import CISPO, GRPO, PPO, RLOO
from async_rl.config.dump import to_toml
from async_rl.config.load import apply_override
from async_rl.config.schema import MathGrader
from async_rl.errors import ConfigError

MINIMAL = """
name = "small"
max_steps = 3
[model]
path = "models/none"
[[data.train]]
kind = "jsonl"
path = "tasks.jsonl"
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        # Field report 53: a misspelt key is refused with the nearest right one.
        ("trainer.learning_rte=1", "unknown key 'trainer.learning_rte' (did you mean 'learning_rate'?)"),
        ("trainr.learning_rate=1", "unknown key 'trainr' (did you mean 'trainer'?)"),
        ("data.train.0.pth='x'", "unknown key 'data.train.0.pth' (did you mean 'path'?)"),
        ("data.train.0.kind='json'", "data.train.0.kind = 'json' is unknown (did you mean 'jsonl'?)"),
        ("algorithm.advantage='gpro'", "algorithm.advantage.kind = 'gpro' is unknown (did you mean 'grpo'?)"),
        ("rollout.engine.kind='vlm'", "rollout.engine.kind = 'vlm' is unknown"),
        ("mode='asynch'", "mode"),
        ("max_steps=0", "max_steps"),
        ("trainer.learning_rate=fast", "Expected `float`, got `str` - at `trainer.learning_rate`"),
        ("data.train.1.path=x", "'1' is no position in a list of 1"),
        ("max_steps.x=1", "max_steps is a value, not a table"),
        ("max_steps", "write key.sub=value"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(run_toml: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(run_toml, [override])
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_the_nearest(run_toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*run\.toml"):
        load(run_toml.with_name("rum.toml"))


def test_what_is_not_toml_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load(path)


def test_a_file_is_laid_over_the_run_and_settings_over_both(run_toml: Path, tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text(
        """
        [algorithm]
        loss = { kind = "cispo", clip_high = 0.5 }
        advantage = { kind = "grpo", normalize_by_std = false }
        [batch]
        groups = 3
        """
    )
    # a setting of the old kind does not stay behind in the new one
    overrides = ["batch.group_size=5", str(preset), "algorithm.loss.clip_low=0.7"]
    run_toml.write_text(run_toml.read_text() + "\n[algorithm.loss]\nkind = 'ppo'\ndual_clip = 4.0\n")
    config = load(run_toml, overrides)
    assert config.algorithm.loss == CISPO(clip_low=0.7, clip_high=0.5)
    assert config.algorithm.advantage == GRPO(normalize_by_std=False)
    assert (config.batch.groups, config.batch.group_size) == (3, 5)
    with pytest.raises(ConfigError, match=r"presett\.toml: no such file \(did you mean '.*preset\.toml'"):
        load(run_toml, [str(tmp_path / "presett.toml")])
    with pytest.raises(ConfigError, match=rf"has no \[model\].*: RUN\.toml {preset}"):
        load(preset)
    preset.write_text("[algorithm")
    with pytest.raises(ConfigError, match=r"preset\.toml: not TOML"):
        load(run_toml, [str(preset)])


def test_a_kind_alone_is_a_table_of_defaults(run_toml: Path) -> None:
    config = load(run_toml, ["algorithm.advantage=rloo", "algorithm.loss=cispo", "reward.grader=math"])
    assert config.algorithm.advantage == RLOO() and config.algorithm.loss == CISPO()
    assert config.reward.grader == MathGrader()
    assert load(run_toml, ["algorithm.loss.clip_low=0.1"]).algorithm.loss == PPO(clip_low=0.1)
    with pytest.raises(ConfigError, match=r"missing required field `beta` - at `algorithm\.loss"):
        load(run_toml, ["algorithm.loss=dro"])


def test_a_setting_that_the_chosen_algorithm_does_not_use_is_refused(run_toml: Path) -> None:
    for override, key in (
        ("algorithm.loss={kind='reinforce', clip_low=0.1}", "algorithm.loss.clip_low"),
        ("algorithm.advantage={kind='rloo', gamma=0.9}", "algorithm.advantage.gamma"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low"),
    ):
        with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
            load(run_toml, [override])


def test_overrides_reach_into_tables_and_lists(run_toml: Path) -> None:
    config = load(
        run_toml,
        ["trainer.learning_rate=1e-5", "data.train.0.path=other.jsonl", "name=fast", "batch.groups=4"],
    )
    assert config.trainer.learning_rate == 1e-5
    assert config.data.train[0].path == "other.jsonl"  # type: ignore[union-attr]
    assert config.name == "fast"
    assert config.batch.groups == 4


def test_the_resolved_configuration_reads_back_equal(run_toml: Path, tmp_path: Path) -> None:
    config = load(run_toml, ["mode=async", "reward.grader={kind='math'}", "staleness.max=3"])
    again = tmp_path / "resolved.toml"
    again.write_text(to_toml(config))
    assert load(again) == config


@given(st.text(max_size=40))
def test_no_override_raises_anything_but_a_configuration_error(text: str) -> None:
    tree = {"name": "x", "data": {"train": [{}]}}
    try:
        apply_override(tree, text)
        parse(tree)
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("mode", "eta", "in_flight", "reuse", "on_exceed"),
    [
        ("sync", 0, False, 1, "wait"),
        ("one-step", 1, False, 1, "wait"),
        ("async", 2, True, 1, "mask"),
        ("off-policy", 4, True, 2, "mask"),
    ],
)
def test_modes_are_presets_of_the_same_numbers(
    run_toml: Path, mode: str, eta: int, in_flight: bool, reuse: int, on_exceed: str
) -> None:
    limits = bounds(load(run_toml, [f"mode={mode}"]))
    assert (limits.eta, limits.in_flight, limits.reuse, limits.on_exceed) == (
        eta,
        in_flight,
        reuse,
        on_exceed,
    )
    assert limits.eta_prime >= 0


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["mode=sync", "staleness.max=1"], "mode 'sync' is 0 by definition"),
        (["staleness.reuse=2"], "only mode 'off-policy'"),
        (["mode=off-policy", "staleness.max=1", "staleness.reuse=3"], "needs staleness.max of at least 2"),
        (["mode=sync", "staleness.on_exceed=mask"], "use 'wait' or 'drop'"),
        (["staleness.on_exceed=correct"], "needs staleness.hard_max"),
        (["staleness.on_exceed=correct", "staleness.hard_max=1"], "is below staleness.max = 2"),
        (["staleness.hard_max=9"], "belongs to on_exceed = 'correct'"),
        (["mode=one-step", "staleness.keep_cache=true"], "has no in-flight update"),
    ],
)
def test_bounds_that_contradict_the_mode_are_refused(run_toml: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        bounds(load(run_toml, overrides))
    assert problem in str(error.value)


def test_the_configuration_and_the_messages_import_no_torch_and_no_engine() -> None:
    code = (
        "import sys, async_rl, async_rl.config, async_rl.protocol.buffer, async_rl.protocol.weight_sync;"
        "import async_rl.cli.main;"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_bare_folders_are_refused_as_packages() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import buffers, async_rl"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "import async_rl.buffers instead" in done.stderr
