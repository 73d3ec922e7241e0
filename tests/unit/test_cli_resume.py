"""What `train --resume` decides before anything starts."""

import json
from pathlib import Path

import msgspec
import pytest

from async_rl.cli.resume import keep_config, require_run, resume
from async_rl.cli.train import set_aside
from async_rl.config import Config, load, parse
from async_rl.config.dump import to_toml
from async_rl.errors import ConfigError, UserError
from async_rl.rundir import RunDir


def configuration(tmp_path: Path, **tables: object) -> Config:
    tree: dict[str, object] = {
        "name": "run",
        "runs": str(tmp_path),
        "model": {"path": "none"},
        "data": {"train": [{"kind": "jsonl", "path": "none"}]},
        "max_steps": 4,
    }
    return parse(tree | tables)


def begun(config: Config, *, steps: int | None = None, ended: str = "max_steps") -> RunDir:
    """A run of `config` that was begun; complete after `steps` steps."""
    run = RunDir.of(config)
    run.create()
    run.config.write_text(to_toml(config))
    run.journal.mkdir()
    (run.journal / "00000001.log").write_text("journal")
    if steps is not None:
        run.summary.write_text(json.dumps({"format": 1, "steps": steps, "ended": ended}))
    return run


def test_each_change_is_told_in_a_line(tmp_path: Path) -> None:
    run, said = begun(configuration(tmp_path)), list[str]()
    resume(configuration(tmp_path, rollout={"workers": 2}, max_steps=9), run, said.append)
    assert said == ["max_steps = 9, was 4", "rollout.workers = 2, was 1"]
    assert run.unfinished


def test_the_first_setting_that_must_stay_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run, said = begun(configuration(tmp_path), steps=4), list[str]()
    with pytest.raises(ConfigError, match=r"^sampling\.temperature = 0\.5, was 1\.0: .*model\.path"):
        resume(configuration(tmp_path, sampling={"temperature": 0.5}, max_steps=9), run, said.append)
    assert run.complete
    assert not said
    assert load(run.config) == configuration(tmp_path)


def test_a_complete_run_needs_more_steps(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run, said = begun(config, steps=4), list[str]()
    with pytest.raises(UserError, match="all its 4 steps; a higher max_steps"):
        resume(config, run, said.append)
    resume(msgspec.structs.replace(config, max_steps=5), run, said.append)
    assert said == [f"the summary so far is in {run.path / 'previous' / '1'}", "max_steps = 5, was 4"]
    assert run.unfinished


def test_a_run_whose_data_ended_has_nothing_more_to_do(tmp_path: Path) -> None:
    run = begun(configuration(tmp_path), steps=2, ended="the data ended after 8 tasks")
    with pytest.raises(UserError, match="complete after 2 steps: the data ended after 8 tasks"):
        resume(configuration(tmp_path, max_steps=9), run, print)


def test_a_run_that_is_not_there_is_told_with_the_nearest_that_is(tmp_path: Path) -> None:
    begun(configuration(tmp_path))
    other = configuration(tmp_path, name="runs")
    with pytest.raises(UserError, match=r"runs: there is no run to go on with \(did you mean 'run'\?\)"):
        require_run(other, RunDir.of(other))
    assert not RunDir.of(other).path.exists()
    require_run(configuration(tmp_path), RunDir.of(configuration(tmp_path)))


def test_a_new_run_says_where_an_unfinished_one_went_and_how_it_would_have_gone_on(tmp_path: Path) -> None:
    said = list[str]()
    set_aside(begun(configuration(tmp_path)), said.append)
    run = begun(configuration(tmp_path), steps=4)
    set_aside(run, said.append)
    set_aside(run, said.append)
    assert len(said) == 2
    assert "previous/1" in said[0] and "--resume" in said[0]
    assert "previous/2" in said[1] and "--resume" not in said[1]


def test_a_trainer_by_hand_keeps_its_settings_and_goes_on_under_no_others(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run = RunDir.of(config)
    run.create()
    keep_config(config, run)
    assert load(run.config) == config
    begun_run = begun(config)
    with pytest.raises(ConfigError, match="mode"):
        keep_config(configuration(tmp_path, mode="sync"), begun_run)
    assert load(run.config) == config
