"""A mixture of experts in a whole ring, with router replay."""

from pathlib import Path

import numpy as np
import pytest

from async_rl.buffers.journal.archive import Archive
from tests.flow import ring

GRADER = (
    "def grade(task, trajectory):\n    return sum(map(str.__eq__, trajectory.text, task.answer)) / len(task.answer)\n"
)
EXPERTS, PER_TOKEN, LAYERS = 4, 2, 2
SETTINGS = (
    "warmup.architecture=qwen3_moe",
    f"warmup.experts={EXPERTS}",
    f"warmup.experts_per_token={PER_TOKEN}",
    f"warmup.layers={LAYERS}",
    "reward.grader={kind='custom', function='grading:grade'}",  # so that hardly a group is of equal rewards
    "trainer.router_replay=true",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ring.make_run(tmp_path)
    (tmp_path / "grading.py").write_text(GRADER)
    return tmp_path


def assert_routed(folder: Path, members: int) -> None:
    """Every trajectory in the journal's draws has the experts of all its tokens but the last."""
    archive = Archive(folder / "runs" / "ring" / "journal")
    draws = [archive.get_draw(place) for place in archive.draws().values()]
    drawn = [archive.get(member.place) for draw in draws for group in draw.groups for member in group.members]
    archive.close()
    assert len(drawn) == members
    for trajectory in drawn:
        assert trajectory.routing is not None and trajectory.routing.dtype == np.int8
        assert trajectory.routing.shape == (len(trajectory.tokens) - 1, LAYERS, PER_TOKEN)
        assert trajectory.routing.min() >= 0 and trajectory.routing.max() < EXPERTS


def test_a_mixture_of_experts_trains_through_the_samplers_experts_and_is_replayed(folder: Path) -> None:
    status, output = ring.run("train", "run.toml", *SETTINGS, "mode=sync", "max_steps=5", cwd=folder)
    assert status == 0, output
    assert ring.summary(folder)["groups"]["conserved"]
    steps = ring.steps(folder)
    assert len(steps) == 5 and sum(record["gradient_norm"] > 0 for record in steps) >= 3
    assert all(abs(record["mismatch_kl_k3"]) < 1e-9 for record in steps)
    assert all(record["ratio_max"] == pytest.approx(1.0, abs=1e-4) for record in steps)
    assert_routed(folder, members=5 * 16)
    status, output = ring.run("replay", "runs/ring", cwd=folder)
    assert status == 0, output
    assert "version 5" in output and "equal" in output


def test_weights_change_in_flight_and_pages_are_shared_and_every_token_has_its_routing(folder: Path) -> None:
    prompts = ("data.template=abcdeabc{prompt}=", "rollout.engine.page_size=4")  # three whole pages of a prompt
    settings = (*SETTINGS, *prompts, "max_steps=6", "sampling.max_new_tokens=16")
    status, output = ring.run("train", "run.toml", *settings, cwd=folder)
    assert status == 0, output
    steps = ring.steps(folder)
    assert len(steps) == 6 and ring.summary(folder)["groups"]["conserved"]
    assert max(int(lag) for record in steps for lag in record["lag_histogram"]) > 0
    assert_routed(folder, members=6 * 16)


def test_router_replay_is_refused_where_there_are_no_experts(folder: Path) -> None:
    status, output = ring.run("check", "run.toml", "trainer.router_replay=true", cwd=folder)
    assert status == 2 and "a model of warmup.architecture = 'llama' has no experts; 'qwen3_moe' has" in output
    status, output = ring.run("check", "run.toml", *SETTINGS, "warmup.experts_per_token=5", cwd=folder)
    assert status == 2 and "warmup.experts_per_token = 5 is more than warmup.experts = 4" in output
    status, output = ring.run("check", "run.toml", *SETTINGS, cwd=folder)
    assert status == 0, output
