"""What `async-rl replay` refuses, and which steps it can make again."""

from pathlib import Path

import pytest

from async_rl.cli.named import named_run, settings_of
from async_rl.cli.replay import changed, folder
from async_rl.config.dump import to_toml
from async_rl.errors import ConfigError, JournalDamaged, UserError
from async_rl.replay import Recorded
from async_rl.rundir import RunDir
from tests.unit.journal_material import write
from tests.unit.trainer_material import configuration


def test_a_replay_changes_how_is_trained_and_nothing_else() -> None:
    settings = configuration()
    config = changed(settings, ["trainer.learning_rate=0.5", "algorithm.loss.clip_low=0.1", "batch.mini_batches=2"])
    assert (config.trainer.learning_rate, config.algorithm.loss.clip_low, config.batch.mini_batches) == (0.5, 0.1, 2)
    assert changed(settings, []) == settings
    assert changed(settings, [f"trainer.learning_rate={settings.trainer.learning_rate}"]) == settings
    for key in ("batch.groups", "sampling.temperature", "staleness.max", "max_steps", "trainers.threads", "model.path"):
        with pytest.raises(ConfigError, match=rf"override '{key}=1': .*sampled and drawn"):
            changed(settings, [f"{key}=1"])
    with pytest.raises(ConfigError, match="unknown key"):
        changed(settings, ["trainer.learningrate=1"])
    with pytest.raises(ConfigError, match="does not divide"):
        changed(settings, ["batch.mini_batches=5"])


def test_replays_are_numbered_and_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert folder(run, None) == tmp_path / "replay" / "1"
    assert folder(run, None) == tmp_path / "replay" / "2"
    assert folder(run, str(tmp_path / "new" / "place")).is_dir()
    with pytest.raises(UserError, match="not empty"):
        folder(run, str(tmp_path / "replay"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        folder(run, str(tmp_path / "file" / "place"))


def test_a_run_is_named_by_its_folder_or_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration()
    Path("my.toml").write_text(to_toml(config))
    with pytest.raises(UserError, match="runs/test: this run was never begun"):
        named_run("my.toml")
    run = RunDir.of(config)
    run.create()
    assert named_run("my.toml")[1] == Path("my.toml")
    with pytest.raises(UserError, match="give the run's own TOML file"):
        settings_of(*named_run("runs/test"))
    run.config.write_text(to_toml(config))  # as it was begun: it may have been given further settings
    for name in ("my.toml", "runs/test"):
        found, file = named_run(name)
        assert (found.path, file) == (run.path, run.config)
        assert settings_of(found, file) == config
    (run.path / "journal").mkdir()
    with pytest.raises(UserError, match=r"runs/tets: no such run.*did you mean 'runs/test'"):
        named_run("runs/tets")


def test_the_steps_that_a_journal_gives_again_begin_with_the_first_that_it_has_whole(tmp_path: Path) -> None:
    write(tmp_path / "whole", steps=3)
    recorded = Recorded(tmp_path / "whole")
    assert (recorded.begin, recorded.end) == (0, 3)
    assert [recorded.drawn(step).step for step in range(3)] == [0, 1, 2]
    with pytest.raises(JournalDamaged, match="step 7 cannot be made again"):
        recorded.drawn(7)
    write(tmp_path / "part", steps=8, checkpoints=True, keep="checkpoint", segment_bytes=2000)
    recorded = Recorded(tmp_path / "part")
    assert 0 < recorded.begin < recorded.end == 8
    assert [recorded.drawn(step).step for step in range(recorded.begin, 8)] == list(range(recorded.begin, 8))
