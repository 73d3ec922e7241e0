"""A whole run with low-rank adapters: what it trains, publishes, writes, and how it goes on."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.flow import ring

pytestmark = pytest.mark.timeout(240)

STEPS = 40
ADAPTERS = "model.lora={rank=4, alpha=8.0}"
SETTINGS = (ADAPTERS, f"max_steps={STEPS}", "trainer.checkpoint_every=3", "trainer.learning_rate=1e-2")


def loaded(folder: Path) -> "torch.nn.Module":
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


def published_bytes(folder: Path) -> set[int]:
    """Of every version that became visible, by the relay's log."""
    log = (folder / "runs" / "ring" / "logs" / "weight_sync.log").read_text()
    return {int(size) for size in re.findall(r"is visible: (\d+) bytes", log)}


def test_a_run_whose_trainer_is_killed_ends_with_the_adapters_of_its_replay(graded: Path) -> None:
    """Bit for bit. What it leaves is merged by `export`, and scored by `eval`."""
    process = ring.start("train", "run.toml", *SETTINGS, cwd=graded)
    ring.until(lambda: len(ring.steps(graded)) >= 8, "step 8")
    pid = ring.pid_of(graded, "trainer")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    status, output = ring.finish(process)
    assert status == 0, output
    assert "starting it anew" in output
    assert [record["step"] for record in ring.steps(graded)] == list(range(STEPS))
    assert ring.summary(graded)["failed_publications"] == 0
    fresh = [step["mismatch_by_lag"]["0"][1] for step in ring.steps(graded) if "0" in step["mismatch_by_lag"]]
    assert fresh and max(fresh) < 1e-8  # the engine samples with the adapters that the trainer has

    status, output = ring.run("replay", "run.toml", cwd=graded)
    assert status == 0, output
    assert f"version {STEPS}: equal to" in output and "versions 0 to" in output

    checkpoint = graded / "runs" / "ring" / "checkpoints" / f"step-{STEPS:08d}"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    assert ring.run("export", "runs/ring", "merged", cwd=graded)[0] == 0
    from peft import PeftModel

    base, merged = loaded(graded / "models" / "tiny"), loaded(graded / "merged")
    rows = torch.arange(6)[None]
    with torch.no_grad():
        before = base(rows).logits  # type: ignore[operator]
        beside = PeftModel.from_pretrained(base, checkpoint)(rows).logits  # type: ignore[arg-type]
        torch.testing.assert_close(merged(rows).logits, beside, atol=1e-5, rtol=0)  # type: ignore[operator]
    assert (before - beside).abs().max() > 1e-2  # something was learned
    for where in (str(checkpoint), "merged"):
        status, output = ring.run("eval", "run.toml", ADAPTERS, "--checkpoint", where, cwd=graded)
        assert status == 0, output


def test_a_publication_of_adapters_takes_a_part_of_the_models_bytes(graded: Path) -> None:
    status, output = ring.run("train", "run.toml", "max_steps=2", cwd=graded)
    assert status == 0, output
    (whole,) = published_bytes(graded)
    status, output = ring.run("train", "run.toml", "max_steps=2", ADAPTERS, cwd=graded)
    assert status == 0, output
    (adapters,) = published_bytes(graded)
    shape = json.loads((graded / "models" / "tiny" / "config.json").read_text())
    layers, hidden, inner = (shape[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    assert adapters == 4 * 4 * layers * (4 * 2 * hidden + 3 * (hidden + inner))
    print(f"bytes of a publication: {whole} whole, {adapters} adapters")
    assert adapters < whole / 2


def test_a_wrong_target_is_refused_before_anything_starts(graded: Path) -> None:
    status, output = ring.run("check", "run.toml", "model.lora={targets=['q_prj']}", cwd=graded)
    assert status == 2
    assert "no linear layer is named 'q_prj' (did you mean 'q_proj'?)" in output
    assert "Traceback" not in output
