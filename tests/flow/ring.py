"""What the tests of a whole ring share: a small run on disk, the command line as a process, what is left of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [a + b + c for a in "abcde" for b in "abcde" for c in "abcde"]

RUN = """
name = "ring"
mode = "async"
max_steps = 4

[model]
path = "models/tiny"

[warmup]
characters = "abcde="
hidden_size = 32
layers = 1
heads = 2
context = 32
steps = 60
batch_size = 32
noise = 0.4

[data]
format = "plain"
template = "{prompt}="
held_out_size = 16
train = [{ kind = "jsonl", path = "train.jsonl" }]
held_out = [{ kind = "jsonl", path = "held_out.jsonl" }]

[batch]
groups = 4
group_size = 4

[sampling]
max_new_tokens = 5

[trainer]
learning_rate = 1e-3
draw_wait_s = 60.0

[services]
connect_s = 60.0
lease_s = 5.0
heartbeat_s = 0.3
stop_s = 5.0
"""


def make_run(folder: Path) -> Path:
    """A run of a few seconds in `folder`: words of three letters, spelled backward."""
    rows = [json.dumps({"prompt": word, "answer": word[::-1]}) for word in WORDS]
    (folder / "train.jsonl").write_text("\n".join(rows[:100]) + "\n")
    (folder / "held_out.jsonl").write_text("\n".join(rows[100:]) + "\n")
    path = folder / "run.toml"
    path.write_text(RUN)
    return path


def start(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    """`async-rl ARGUMENTS` as a process of its own, in a session of its own."""
    command = [sys.executable, "-m", "async_rl.cli.main", *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def finish(process: "subprocess.Popen[str]", timeout: float = 100) -> tuple[int, str]:
    """(exit status, everything it printed); killed with all its children when it takes longer."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=10)
        raise AssertionError(f"no end after {timeout} s; it printed:\n{output}") from None
    return process.returncode, output


def run(*arguments: str, cwd: Path, timeout: float = 100) -> tuple[int, str]:
    return finish(start(*arguments, cwd=cwd), timeout)


def until(ready: Callable[[], Any], what: str, timeout: float = 60) -> Any:
    """What `ready` gives, once it gives something."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found = ready()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout} s")


def steps(folder: Path) -> list[dict[str, Any]]:
    """The step lines of the run's metrics so far."""
    try:
        lines = (folder / "runs" / "ring" / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def summary(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "runs" / "ring" / "summary.json").read_text())
    return value


def pid_of(folder: Path, service: str) -> int | None:
    """The announced pid of a running service."""
    try:
        record = json.loads((folder / "runs" / "ring" / "services" / f"{service}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return int(record["pid"]) if alive(record["pid"]) else None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left_over(folder: Path) -> list[str]:
    """Command lines of live processes that work in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "cwd").resolve() == folder.resolve() and alive(int(entry.name)):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
