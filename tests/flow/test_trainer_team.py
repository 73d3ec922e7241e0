"""A trainer of several ranks in a whole run: lost ranks, other numbers of ranks, ranks that are started by hand."""

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.flow import ring
from tests.flow.test_resume import assert_replayed, assert_whole, last_line

pytestmark = pytest.mark.timeout(400)

STEPS = 40
SETTINGS = (f"max_steps={STEPS}", "trainer.checkpoint_every=3")
OVER_NETWORK = (*SETTINGS, "weight_sync.transport='collective'")
TWO = (*OVER_NETWORK, "trainer.ranks=2", "services.max_failures=1000")


def ranks(folder: Path) -> dict[int, int]:
    """Rank -> pid of those that follow."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text().split("\0")
            if (entry / "cwd").resolve() == folder.resolve() and "async_rl.services.trainer.follower" in command:
                found[int(command[-2])] = int(entry.name)
        except (OSError, ValueError):
            continue
    return {rank: pid for rank, pid in found.items() if ring.alive(pid)}


def kill_some(folder: Path, process: "ring.subprocess.Popen[str]", kills: int) -> None:
    """Every third time the one that leads, else the one that follows."""
    dice = random.Random(5)
    for kill in range(kills):
        before = len(ring.steps(folder))
        ring.until(lambda at=before: len(ring.steps(folder)) > at and ranks(folder), "a further step")  # type: ignore[misc]
        time.sleep(dice.uniform(0.0, 0.3))
        pid = ring.pid_of(folder, "trainer") if kill % 3 == 2 else ranks(folder).get(1)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    assert process.poll() is None, process.communicate()[0]


def test_a_run_that_loses_ranks_ends_with_the_weights_of_its_replay(graded: Path) -> None:
    """Both ranks send their parts of each version, and one dies now and then in the middle of that or of a step."""
    process = ring.start("train", "run.toml", *TWO, cwd=graded)
    kill_some(graded, process, 5)
    status, output = ring.finish(process, 200)
    assert status == 0, output
    assert "Traceback" not in output
    assert ring.left_over(graded) == []
    log = (graded / "runs" / "ring" / "logs" / "trainer.log").read_text()
    assert "error: rank 1 of the trainer ended with status -9" in log
    assert_whole(graded)
    assert_replayed(graded)


@pytest.mark.slow
def test_twenty_lost_ranks(graded: Path) -> None:
    process = ring.start("train", "run.toml", *TWO, "max_steps=150", cwd=graded)
    kill_some(graded, process, 20)
    status, output = ring.finish(process, 300)
    assert status == 0, output
    assert_whole(graded, 150)
    status, output = ring.run("replay", "run.toml", cwd=graded, timeout=200)
    assert status == 0 and "version 150: equal to" in output, output


def test_a_run_goes_on_with_other_numbers_of_ranks(graded: Path) -> None:
    """4, then 2, then 1; weights and optimizer are those of the checkpoint, whoever holds which part of them."""
    settings = (*SETTINGS, "trainer.micro_batch_tokens=64")
    begun = ("train", "run.toml", *settings, "trainer.ranks=4", "trainer.sequence_parallel=2")
    for arguments in (begun, ("train", "run.toml", "--resume", *settings, "trainer.ranks=2")):
        at = len(ring.steps(graded))
        process = ring.start(*arguments, cwd=graded)
        ring.until(lambda at=at: len(ring.steps(graded)) >= at + 5, "some steps", timeout=90)  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        status, output = ring.finish(process)
        assert status == 130, output
        assert ring.left_over(graded) == []
    status, output = ring.run("train", "run.toml", "--resume", *settings, cwd=graded)
    assert status == 0, output
    assert "trainer.ranks = 1, was 2" in output
    assert "damaged" not in (graded / "runs" / "ring" / "logs" / "trainer.log").read_text()
    assert_whole(graded)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_a_rank_that_is_started_by_hand_joins_and_joins_the_next_leading_one(graded: Path) -> None:
    settings = (*TWO, "trainer.local_ranks=1", f"trainer.rendezvous='127.0.0.1:{free_port()}'")
    process = ring.start("train", "run.toml", *settings, cwd=graded)
    ring.until(lambda: (graded / "runs" / "ring" / "run.toml").exists(), "the run's settings")
    by_hand = ring.start("serve", "trainer", "runs/ring/run.toml", "--rank", "1", cwd=graded)
    ring.until(lambda: len(ring.steps(graded)) >= 3, "three steps")
    leading = ring.pid_of(graded, "trainer")
    assert leading is not None
    os.kill(leading, signal.SIGKILL)
    status, output = ring.finish(process)
    assert status == 0, output
    status, said = ring.finish(by_hand)
    assert status == 0, said
    assert said.count("rank 1 of 2") == 2
    assert_whole(graded)


def test_a_rank_that_does_not_come_is_named(graded: Path) -> None:
    settings = (*OVER_NETWORK, "trainer.ranks=3", "trainer.local_ranks=2", "trainer.collective_s=4")
    address = f"127.0.0.1:{free_port()}"
    status, output = ring.run("train", "run.toml", *settings, f"trainer.rendezvous='{address}'", cwd=graded)
    assert status == 1
    assert f"rank 2 of the trainer at {address} did not come within 4 s (trainer.collective_s = 4)" in last_line(output)
    assert ring.left_over(graded) == []


def test_a_rank_with_other_settings_is_refused(graded: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = (*OVER_NETWORK, "trainer.ranks=2", "trainer.local_ranks=1", f"trainer.rendezvous='{address}'")
    process = ring.start("train", "run.toml", *settings, cwd=graded)
    status, output = ring.run("serve", "trainer", "run.toml", "--rank", "1", *settings, "seed=7", cwd=graded)
    assert status == 2
    assert "seed = 7, was 0 with the leading rank" in last_line(output)
    process.send_signal(signal.SIGINT)  # while it waits for a rank that fits
    assert ring.finish(process)[0] == 130
    log = (graded / "runs" / "ring" / "logs" / "trainer.log").read_text()
    assert "error" not in log
    assert ring.left_over(graded) == []


def test_what_only_one_rank_finds_ends_the_run_with_its_words(graded: Path) -> None:
    (graded / "flow.py").write_text(
        "import torch.distributed as dist\n\nfrom async_rl.errors import UserError\n"
        "from async_rl.services.trainer.step import learn\n\n\n"
        "def step(batch, roles):\n"
        "    if dist.get_rank() == 1 and batch.drawn.step == 2:\n"
        "        raise UserError('flow.step: not on this host')\n"
        "    return learn(batch, roles)\n"
    )
    status, output = ring.run(
        "train", "run.toml", *SETTINGS, "trainer.ranks=2", "algorithm.step='flow:step'", cwd=graded
    )
    assert status == 2, output
    assert "rank 1: flow.step: not on this host" in last_line(output)
    assert ring.left_over(graded) == []
