"""The benchmark of the buffer does what it says, with what is installed here; its figures are judged by nobody."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def quick(section: str, folder: Path) -> dict[str, object]:
    command = [sys.executable, "benchmarks/buffer.py", "--quick", "--sections", section, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["benchmark"], report["quick"]) == ("buffer", True)
    assert not list(folder.iterdir())
    return report[section]


def test_everything_put_is_got_at_each_granularity(tmp_path):
    report = quick("throughput", tmp_path)
    assert list(report["samples_per_s"]) == ["1x32", "8x1", "8x8", "128x1", "128x2"]
    for granularity, rates in report["samples_per_s"].items():
        assert {"zeromq", "ours", "ours_no_journal"} <= set(rates), granularity
        assert rates["ours"]["life"] < rates["ours"]["put_get"] < rates["ours"]["put"]
        assert report["ratios"][granularity]["no_journal/zeromq"] > 0
    assert report["disk_mb_per_s"] > 0


@pytest.mark.parametrize(("section", "figure"), [("workers", "ratio"), ("memory", "growth")])
def test_many_workers_and_many_groups_are_measured(section, figure, tmp_path):
    assert quick(section, tmp_path)[figure] > 0
