"""A whole run whose weights go over a network or a shared folder, to two relays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow import ring

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("transport", "full_every"), [("collective", 1), ("disk", 3)])
def test_a_run_with_two_relays_ends_and_leaves_nothing(graded, transport, full_every):
    settings = (
        f"weight_sync.transport={transport}",
        f"weight_sync.full_every={full_every}",
        "weight_sync.relays=2",
        "rollout.workers=2",
        "max_steps=3",
    )
    status, output = ring.run("check", "run.toml", *settings, cwd=graded)
    assert status == 0, output
    status, output = ring.run("train", "run.toml", *settings, cwd=graded)
    assert status == 0, output
    summary = ring.summary(graded)
    assert summary["steps"] == 3
    assert summary["failed_publications"] == 0
    logs = graded / "runs" / "ring" / "logs"
    for k in range(2):
        assert "version 3 is visible" in (logs / f"weight_sync-{k}.log").read_text()
    assert ring.left_over(graded) == []


def test_the_benchmark_of_publications_runs_and_ends_with_its_figures():
    command = [sys.executable, "benchmarks/weights.py", "--quick", "--sections", "shm,delta"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["shm"]["bytes"] == figures["delta"]["bytes"] > 10**8
    assert figures["shm"]["paused_s"] > 0
