"""`async-rl replay`: a run is trained again from its journal, with nothing running."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from async_rl.buffers.journal.archive import Archive
from tests.flow import ring

pytestmark = pytest.mark.timeout(180)


def trained(folder: Path, *settings: str) -> None:
    status, output = ring.run("train", "run.toml", *settings, cwd=folder)
    assert status == 0, output


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def metrics(folder: Path, number: int) -> list[dict[str, object]]:
    lines = (folder / "runs" / "ring" / "replay" / str(number) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run_once(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("replayed") / "work"
    shutil.copytree(warm, folder)
    (folder / "grading.py").write_text("def grade(task, trajectory):\n    return trajectory.text.count('a') / 5\n")
    grader = "reward.grader={kind='custom', function='grading:grade'}"
    trained(folder, "max_steps=6", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=9", grader)
    return folder


@pytest.fixture
def folder(run_once: Path, tmp_path: Path) -> Path:
    target = tmp_path / "work"
    shutil.copytree(run_once, target)
    return target


def test_a_replay_ends_with_the_same_weights_and_figures(folder: Path) -> None:
    status, output = ring.run("replay", "run.toml", cwd=folder)
    assert status == 0, output
    for version in (2, 4, 6):
        assert f"version {version}: equal to runs/ring/checkpoints/step-{version:08d}" in output
    assert "equal at version 2, 4, 6" in output
    figures = ("step", "group_ids", "reward_mean", "gradient_norm", "lag_histogram", "mismatch_kl_k3", "learning_rate")
    again = [[record[figure] for figure in figures] for record in metrics(folder, 1)]
    assert again == [[record[figure] for figure in figures] for record in ring.steps(folder)]
    made = folder / "runs" / "ring" / "replay" / "1"
    assert (made / "run.toml").read_text() == (folder / "runs" / "ring" / "run.toml").read_text()
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(made / "checkpoints" / "step-00000006")


def test_other_hyper_parameters_train_on_the_same_samples(folder: Path) -> None:
    arguments = ("trainer.learning_rate=3e-3", "batch.mini_batches=2", "algorithm.loss.clip_high=0.3", "--steps", "3")
    status, output = ring.run("replay", "runs/ring", *arguments, "--out", "tried", cwd=folder)
    assert status == 0, output
    assert "not compared" in output
    records = [json.loads(line) for line in (folder / "tried" / "metrics.jsonl").read_text().splitlines()]
    before = ring.steps(folder)[:3]
    assert [record["group_ids"] for record in records] == [record["group_ids"] for record in before]
    assert {record["updates"] for record in records} == {2}
    assert records[0]["reward_mean"] == before[0]["reward_mean"]
    assert (folder / "tried" / "checkpoints" / "step-00000003").is_dir()


def test_weights_that_are_not_those_of_the_run_are_an_error_with_the_version(folder: Path) -> None:
    # Another model than the one that the run began with, under the same name.
    checkpoint = folder / "runs" / "ring" / "checkpoints" / "step-00000006" / "model.safetensors"
    shutil.copy(checkpoint, folder / "models" / "tiny" / "model.safetensors")
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 1
    assert "version 2: the weights are not those of runs/ring/checkpoints/step-00000002" in last_line(output)


def test_a_damaged_trajectory_stops_the_replay_at_its_step(folder: Path) -> None:
    archive = Archive(folder / "runs" / "ring" / "journal")
    place = archive.get_draw(archive.draws()[3]).groups[0].members[0].place
    path = folder / "runs" / "ring" / "journal" / f"{place.segment:08}.log"
    broken = bytearray(path.read_bytes())
    broken[place.offset + place.nbytes // 2] ^= 4
    path.write_bytes(broken)
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 1
    assert last_line(output).startswith("async-rl: error: step 3 cannot be made again: runs/ring/journal/")
    assert f"bytes {place.offset} to {place.offset + place.nbytes}" in last_line(output)
    assert [record["step"] for record in metrics(folder, 1)] == [0, 1, 2]
    assert (folder / "runs" / "ring" / "replay" / "1" / "checkpoints" / "step-00000003").is_dir()
    status, output = ring.run("buffer", "runs/ring", cwd=folder)
    assert status == 0, output
    assert f"bytes {place.offset} to {place.offset + place.nbytes}: the trajectory of group" in output


def test_a_journal_that_keeps_less_is_replayed_from_a_checkpoint(graded: Path) -> None:
    settings = ("max_steps=9", "trainer.checkpoint_every=3", "trainer.keep_checkpoints=2", "journal.keep='checkpoint'")
    trained(graded, *settings)
    status, output = ring.run("replay", "runs/ring", cwd=graded)
    assert status == 0, output
    assert "versions 6 to 9 again, from runs/ring/checkpoints/step-00000006" in output
    assert "version 9: equal to" in output
    status, output = ring.run("replay", "runs/ring", "trainer.learning_rate=1e-2", cwd=graded)
    assert status == 0, output
    assert "version 9: equal to" not in output


def test_draws_that_are_trained_several_times_are_replayed_so(graded: Path) -> None:
    trained(graded, "max_steps=6", "mode=off-policy", "trainer.checkpoint_every=3")
    status, output = ring.run("replay", "runs/ring", cwd=graded)
    assert status == 0, output
    assert "equal at version 3, 6" in output


def test_a_run_that_goes_on_is_replayed_up_to_the_step_it_has_made(graded: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=500", "trainer.checkpoint_every=5", cwd=graded)
    try:
        ring.until(lambda: len(ring.steps(graded)) >= 6, "step 6")
        status, output = ring.run("replay", "runs/ring", "--steps", "6", cwd=graded)
        assert status == 0, output
        assert "step 6/6" in output
        before = len(ring.steps(graded))
        ring.until(lambda: len(ring.steps(graded)) > before, "another step of the run")
    finally:
        os.killpg(process.pid, signal.SIGINT)
        assert ring.finish(process)[0] == 130


def test_what_a_replay_cannot_change_or_find_is_one_line(folder: Path) -> None:
    for arguments, text in (
        (("runs/ring", "sampling.temperature=0.5"), "sampling.temperature"),
        (("runs/ring", "batch.groups=2"), "batch.groups"),
        (("runs/ring", "batch.mini_batches=3"), "does not divide"),
        (("runs/ring", "--steps", "0"), "--steps 0"),
        (("runs/other",), "no such run"),
        (("runs/ring", "--out", "models"), "not empty"),
    ):
        status, output = ring.run("replay", *arguments, cwd=folder)
        assert status == 2, output
        assert text in last_line(output)
        assert len(output.splitlines()) == 1
    shutil.rmtree(folder / "runs" / "ring" / "journal")
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 2
    assert "no journal is there" in last_line(output)
