"""`async-rl buffer`: what is in the buffer, while a run goes on and after it was killed."""

import re
from pathlib import Path

import pytest

from async_rl.buffers.journal.archive import Archive
from tests.flow import ring

pytestmark = pytest.mark.timeout(180)


def shown(folder: Path, *arguments: str) -> str:
    status, output = ring.run("buffer", *arguments, cwd=folder)
    assert status == 0, output
    return output


def test_a_live_run_is_looked_into_and_a_dead_one_too(graded: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=500", cwd=graded)
    ring.until(lambda: len(ring.steps(graded)) >= 4, "step 4")
    live = shown(graded, "run.toml")
    assert "not running" not in live
    assert_overview(live)
    process.kill()
    process.communicate()
    ring.until(lambda: not ring.left_over(graded), "the end of every service", timeout=20)
    before = {path: path.read_bytes() for path in (graded / "runs" / "ring" / "journal").iterdir()}
    dead = shown(graded, "runs/ring")
    assert "the buffer is not running" in dead
    assert_overview(dead)
    assert before == {path: path.read_bytes() for path in (graded / "runs" / "ring" / "journal").iterdir()}
    assert_groups(graded)


def assert_overview(output: str) -> None:
    assert re.search(r"journal: [\d,]+ bytes in 1 segment ", output)
    (numbers,) = re.findall(r"admitted (\d+) = trained (\d+) \+ dropped (\d+) .*\+ held (\d+)", output)
    admitted, trained, dropped, held = map(int, numbers)
    assert admitted == trained + dropped + held
    assert f"version {trained // 4} of 500" in output
    assert "oldest lease: " in output
    rows = re.findall(r"^ +\d+ +\d+ +[a-z]+ .*? s  ", output + "  ", flags=re.MULTILINE)
    assert len(rows) <= held


def assert_groups(folder: Path) -> None:
    """A group that was trained is held no more, and found: its life, its members, each token of one."""
    archive = Archive(folder / "runs" / "ring" / "journal")
    group = archive.get_draw(archive.draws()[1]).groups[2]
    output = shown(folder, "runs/ring", "--group", str(group.group))
    order = (
        "admitted",
        "leased to rollout-0",
        "generated",
        "leased to reward-0",
        "scored",
        "ready",
        "drawn for step 1",
    )
    places = [output.index(word) for word in order]
    assert places == sorted(places)
    assert "drawn for step 1" in output
    assert "trained in step 1" in output
    assert group.task.prompt is not None and repr(group.task.prompt) in output
    assert output.count("\nmember ") == 4

    trajectory = archive.get(group.members[0].place)
    output = shown(folder, "runs/ring", "--group", str(group.group), "--member", str(group.members[0].member))
    assert f"prompt: {group.task.prompt!r}" in output
    assert f"completion: {trajectory.text!r}" in output
    assert f"score: {group.members[0].score.reward}" in output
    rows = [line.split() for line in output.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert [int(row[1]) for row in rows] == trajectory.tokens.tolist()
    assert [row[2] == "yes" for row in rows] == trajectory.action.tolist()
    figures = [float(row[4]) for row in rows if row[2] == "yes"]
    assert figures == pytest.approx(trajectory.logprobs[trajectory.action].tolist(), abs=1e-4)


def test_what_is_not_there_is_one_line(graded: Path) -> None:
    for arguments in (("runs/ring",), ("run.toml",)):
        status, output = ring.run("buffer", *arguments, cwd=graded)
        assert status == 2
        assert len(output.splitlines()) == 1, output
    status, output = ring.run("buffer", "run.toml", "--member", "1", cwd=graded)
    assert status == 2
    assert "--group" in output
