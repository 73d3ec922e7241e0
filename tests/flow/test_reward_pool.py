"""The pool's processes are killed for real, and none is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from async_rl.config.schema import CustomGrader, ExactGrader, MathGrader, Reward
from async_rl.errors import UserError
from async_rl.services.reward.pool import Died, GraderPool, Hung, verdict
from async_rl.trajectory import Score, Task, Trajectory

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(60),
]

GRADERS = '''
import os, subprocess, sys, time
from pathlib import Path

def by_text(task, trajectory):
    """Does what the completion says, and leaves a file for each process that graded."""
    Path(f"graded-{os.getpid()}").touch()
    match trajectory.text.split():
        case ["hang"]:
            time.sleep(3600)
        case ["hang-with-children"]:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            time.sleep(3600)
        case ["hang-first"]:
            if not Path("hung").exists():
                Path("hung").touch()
                time.sleep(3600)
            return 0.5
        case ["segfault"]:
            import ctypes
            ctypes.string_at(0)
        case ["exit"]:
            sys.exit(3)
        case ["exit-first"]:
            if not Path("exited").exists():
                Path("exited").touch()
                sys.exit(3)
            return 0.5
        case ["print"]:
            print("x" * 100_000, flush=True)
            os.write(1, b"y" * 100_000)
            print(sys.stdin.read())
            return 1.0
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return 1.0
        case ["leave-a-child"]:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            return 1.0
        case ["raise"]:
            raise RuntimeError("no sandbox")
        case ["abstain"]:
            return None
        case [number]:
            return float(number)
'''
ANYONE = Task(index=0, source="tests", prompt="?", answer="73")


def said(text: str, tokens: int = 8) -> Trajectory:
    return Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        action=np.ones(tokens, bool),
        logprobs=np.zeros(tokens, np.float32),
        versions=[(0, tokens)],
        stop="eos",
        text=text,
    )


def config(processes: int = 1, timeout_s: float = 0.5) -> Reward:
    grader = CustomGrader(function="graders_of_the_pool:by_text")
    return Reward(processes=processes, grader=grader, timeout_s=timeout_s, timeout_reward=-2.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of the pool's processes. After each test none of them may be left."""
    (tmp_path / "graders_of_the_pool.py").write_text(GRADERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert eventually_none(tmp_path) == []


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes, other than this one, whose current folder is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and int(process.name) != os.getpid() and (process / "cwd").readlink() == folder:
                found.append(f"{process.name} {(process / 'cmdline').read_text()[:80]}")
    return found


def eventually_none(folder: Path) -> list[str]:
    """Death by a signal takes the kernel a moment."""
    deadline = time.monotonic() + 10
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def grade(reward: Reward, *texts: str) -> list[Score]:
    async def main() -> list[Score]:
        async with GraderPool(reward) as pool:
            return await asyncio.gather(*(pool.grade(ANYONE, said(text)) for text in texts))

    return asyncio.run(main())


def test_scores_come_back_as_the_grader_gave_them() -> None:
    scores = grade(config(), "0.25", "abstain", "raise", "nan")
    assert scores[0] == Score(reward=0.25)
    assert scores[1] == Score(reward=None, status="abstained")
    assert (scores[2].status, scores[2].votes) == ("failed", False)
    assert "RuntimeError: no sandbox" in scores[2].detail
    assert scores[3].detail == "the grader returned reward = nan"


def test_the_shipped_graders_run_in_the_pool() -> None:
    """Field report 42: right in any process, although this one is not the main thread's."""
    task = Task(index=0, source="sums", prompt="?", answer=r"$\frac13$")

    async def main() -> Score:
        async with GraderPool(Reward(grader=MathGrader())) as pool:
            return await pool.grade(task, said(r"\boxed{\frac13}"))

    assert asyncio.run(main()).reward == 1.0
    assert grade(Reward(grader=ExactGrader()), " 73 ")[0].reward == 1.0


def test_a_large_trajectory_arrives_whole() -> None:
    async def main() -> Score:
        async with GraderPool(Reward(grader=ExactGrader())) as pool:
            return await pool.grade(ANYONE, said("73", tokens=200_000))

    assert asyncio.run(main()).reward == 1.0


def test_three_hanging_samples_in_a_pool_of_two_leave_the_fourth_scored() -> None:
    """Field report 43: a time-out that stops the waiting but not the hang loses the slot."""
    scores = grade(config(processes=2), "hang", "hang", "hang", "0.75")
    assert [score.status for score in scores] == ["timeout", "timeout", "timeout", "graded"]
    assert [score.reward for score in scores] == [-2.0, -2.0, -2.0, 0.75]
    assert all(score.votes for score in scores)
    assert "reward.timeout_s = 0.5" in scores[0].detail


def test_a_hang_is_tried_once_more_in_a_fresh_process(folder: Path) -> None:
    assert grade(config(), "hang-first")[0] == Score(reward=0.5)
    assert len(list(folder.glob("graded-*"))) == 2


def test_a_kill_takes_the_grader_s_own_children(folder: Path) -> None:
    """Field report 41, for graders: no process is left."""
    assert grade(config(), "hang-with-children")[0].status == "timeout"
    assert eventually_none(folder) == []


def test_children_left_behind_end_with_the_pool() -> None:
    assert grade(config(), "leave-a-child", "leave-a-child") == [Score(reward=1.0)] * 2


@pytest.mark.parametrize(("text", "how"), [("segfault", "signal SIGSEGV"), ("exit", "exit status 3")])
def test_a_process_that_dies_is_tried_once_more_and_then_a_status(folder: Path, text: str, how: str) -> None:
    scores = grade(config(), text, "0.5")
    once = f"the grading process ended by itself: {how}"
    assert scores[0] == Score(reward=None, status="failed", detail=f"{once}; then {once}")
    assert scores[1] == Score(reward=0.5)
    assert len(list(folder.glob("graded-*"))) == 3  # two died, one went on


def test_one_death_costs_nothing() -> None:
    assert grade(config(), "exit-first")[0] == Score(reward=0.5)


def test_what_a_grader_prints_does_not_end_up_among_the_answers() -> None:
    assert grade(config(timeout_s=10), "print", "0.5") == [Score(reward=1.0), Score(reward=0.5)]


def test_a_process_killed_while_idle_is_replaced(folder: Path) -> None:
    def kill_the_grader() -> None:
        os.kill(int(next(folder.glob("graded-*")).name.partition("-")[2]), signal.SIGKILL)

    async def main() -> list[Score]:
        async with GraderPool(config()) as pool:
            first = await pool.grade(ANYONE, said("1"))
            kill_the_grader()
            return [first, await pool.grade(ANYONE, said("2"))]

    assert asyncio.run(main()) == [Score(reward=1.0), Score(reward=2.0)]


def test_a_cancelled_grading_gives_its_answer_to_nobody_else() -> None:
    async def main() -> Score:
        async with GraderPool(config(timeout_s=30)) as pool:
            slow = asyncio.create_task(pool.grade(ANYONE, said("sleep 0.3")))
            await asyncio.sleep(0.1)
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            return await pool.grade(ANYONE, said("0.125"))

    assert asyncio.run(main()).reward == 0.125


def test_a_slow_grader_never_blocks_the_event_loop() -> None:
    """Field report 45: a reward that sleeps 2 s delays no heartbeat by more than 100 ms.

    The machine may be busy with something else, so one undisturbed try out of three is enough: a loop that
    waits for the grader is late by 2 s in each of them."""

    async def worst_delay(pool: GraderPool) -> float:
        slow = asyncio.create_task(pool.grade(ANYONE, said("sleep 2")))
        worst, last = 0.0, time.monotonic()
        while not slow.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            worst, last = max(worst, now - last - 0.01), now
        assert (await slow).reward == 1.0
        return worst

    async def main() -> bool:
        async with GraderPool(config(timeout_s=10)) as pool:
            for _ in range(3):
                if await worst_delay(pool) < 0.1:
                    return True
        return False

    assert asyncio.run(main())


def test_a_grader_that_cannot_be_imported_is_the_user_s_error() -> None:
    async def main() -> None:
        async with GraderPool(Reward(grader=CustomGrader(function="graders_of_the_pool:by_txt"))):
            pass

    with pytest.raises(UserError, match="did you mean 'by_text'"):
        asyncio.run(main())


def test_a_grader_whose_import_ends_the_process_is_the_user_s_error(folder: Path) -> None:
    (folder / "ends.py").write_text("import os; os._exit(7)")

    async def main() -> None:
        async with GraderPool(Reward(grader=CustomGrader(function="ends:grade"))):
            pass

    with pytest.raises(UserError, match="exit status 7"):
        asyncio.run(main())


def test_no_process_outlives_a_service_that_is_killed(folder: Path) -> None:
    """Field report 54: a crash leaves no child, nor a child's child."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_reward_pool import ANYONE, GraderPool, config, said

async def main():
    async with GraderPool(config(processes=2, timeout_s=3600)) as pool:
        await pool.grade(ANYONE, said("leave-a-child"))
        hangs = [asyncio.create_task(pool.grade(ANYONE, said("hang-with-children"))) for _ in range(2)]
        while len(list(__import__("pathlib").Path().glob("graded-*"))) < 2:
            await asyncio.sleep(0.05)
        print("hanging", flush=True)
        await asyncio.gather(*hangs)

asyncio.run(main())
"""
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    with service, contextlib.closing(service.stdout):
        assert service.stdout.readline() == "hanging\n"
        assert len(processes_in(folder)) >= 5
        service.kill()
        service.wait(10)
        assert eventually_none(folder) == []


def test_only_hangs_are_the_policy_s_doing() -> None:
    reward = Reward(timeout_reward=-1.0)
    assert verdict([Hung(), Hung()], reward).status == "timeout"
    assert verdict([Died("x"), Died("y")], reward).detail == "x; then y"
    for mixed in ([Hung(), Died("x")], [Died("x"), Hung()]):
        assert verdict(mixed, reward).status == "failed"
