"""The whole ring with rollouts on the real vLLM: services here, workers in vLLM's environment (`make test-vllm`)."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.flow import ring

PYTHON = os.environ.get("ASYNC_RL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON, reason="ASYNC_RL_VLLM_PYTHON names no interpreter; `make test-vllm` does"),
]
# Heads of 32, the smallest that vLLM's CPU attention takes; enough steps that most groups have right and wrong ones.
MODEL = ["warmup.hidden_size=64", "warmup.steps=400", "warmup.noise=0.2"]
SETTINGS = [
    *MODEL,
    "rollout.engine.kind=vllm",
    "rollout.engine.max_requests=16",
    "rollout.engine.kv_cache_bytes=67108864",
    "rollout.max_in_flight=16",
    "services.connect_s=120",
]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    ring.make_run(folder)
    status, output = ring.run("warmup", "run.toml", *MODEL, cwd=folder)
    assert status == 0, output
    return folder


@pytest.mark.parametrize(("mode", "lag", "enough"), [("sync", 0, 20), ("async", 2, 1)])
def test_twenty_updates_and_the_mismatch_stays_small(
    warm: Path, tmp_path: Path, mode: str, lag: int, enough: int
) -> None:
    """The sampler's log-probabilities are the trainer's: k3 over tokens of lag 0 is rounding, in every step that has
    such tokens. Under async, updates come in flight, and how many tokens are sampled after one is for the clock."""
    folder = tmp_path / "work"
    shutil.copytree(warm, folder)
    given = [*SETTINGS, f"mode={mode}", f"rollout.python={PYTHON}", "max_steps=20", "batch.groups=8"]
    status, output = ring.run("train", "run.toml", *given, cwd=folder, timeout=300)
    assert status == 0, output
    steps = ring.steps(folder)
    assert len(steps) == 20
    fresh = [step["mismatch_by_lag"]["0"][1] for step in steps if "0" in step["mismatch_by_lag"]]
    print(f"mismatch KL (k3) at lag 0, step by step ({mode}):", [f"{k3:.1e}" for k3 in fresh])
    assert len(fresh) >= enough and max(fresh) < 1e-8
    assert max(step["lag_max"] for step in steps) <= lag
    assert ring.summary(folder)["failed_publications"] == 0
    assert ring.left_over(folder) == []


def test_lora_the_sampler_has_the_adapters_that_the_trainer_has(warm: Path, tmp_path: Path) -> None:
    """Field report 31, in a whole run: a sampler of the base model would show as a mismatch that grows."""
    folder = tmp_path / "work"
    shutil.copytree(warm, folder)
    adapters = ["model.lora={rank=4, alpha=8.0}", "trainer.learning_rate=1e-2"]
    given = [*SETTINGS, *adapters, "mode=sync", f"rollout.python={PYTHON}", "max_steps=12", "batch.groups=8"]
    status, output = ring.run("train", "run.toml", *given, cwd=folder, timeout=300)
    assert status == 0, output
    steps = ring.steps(folder)
    assert len(steps) == 12 and len({step["gradient_norm"] for step in steps}) > 6
    fresh = [step["mismatch_by_lag"]["0"][1] for step in steps]
    print("mismatch KL (k3) at lag 0, step by step (lora):", [f"{k3:.1e}" for k3 in fresh])
    assert max(fresh) < 1e-8
    assert ring.left_over(folder) == []


def test_a_worker_that_is_killed_leaves_no_engine_and_the_run_goes_on(warm: Path, tmp_path: Path) -> None:
    """Field report 54, of an engine with processes of its own."""
    folder = tmp_path / "work"
    shutil.copytree(warm, folder)
    process = ring.start("train", "run.toml", *SETTINGS, f"rollout.python={PYTHON}", "max_steps=12", cwd=folder)
    ring.until(lambda: len(ring.steps(folder)) >= 2, "two steps", 120)
    pid = ring.pid_of(folder, "rollout-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    status, output = ring.finish(process, 250)
    assert status == 0, output
    assert "starting it anew" in output
    assert len(ring.steps(folder)) == 12
    ring.until(lambda: not ring.left_over(folder), "the end of every process of the run", 30)


def test_a_model_that_vllm_cannot_run_is_one_line(tmp_path: Path) -> None:
    """Heads of 16: vLLM would die at the first request, and be started anew again and again."""
    ring.make_run(tmp_path)
    given = [*SETTINGS, "warmup.hidden_size=32", f"rollout.python={PYTHON}"]
    assert ring.run("warmup", "run.toml", *given, cwd=tmp_path)[0] == 0
    status, output = ring.run("train", "run.toml", *given, cwd=tmp_path, timeout=120)
    assert status == 2, output
    assert "its attention heads are 16 wide" in output
    assert "Traceback" not in output
    assert ring.left_over(tmp_path) == []
