"""The reward service against a scripted buffer, over real sockets."""

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from async_rl.actor.mailbox import Mailbox
from async_rl.config.schema import Config, CustomGrader, Data, Grader, JsonLines, Model, Reward, Services
from async_rl.protocol.buffer import (
    Acquire,
    BufferReply,
    BufferRequest,
    Extend,
    Extended,
    FinishScore,
    Graded,
    LeaseId,
    LeaseReplies,
    LeaseReply,
    Leases,
    ScoreLease,
)
from async_rl.services.reward.service import RewardService
from async_rl.trajectory import Task, Trajectory

pytestmark = pytest.mark.timeout(60)

GRADERS = """
import os, time

def by_text(task, trajectory):
    if trajectory.text == "hang":
        time.sleep(3600)
    if trajectory.text == "sleep":
        time.sleep(2)
        return 1.0
    if trajectory.text == "die":
        os._exit(1)
    return float(trajectory.text)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "graders_of_the_service.py").write_text(GRADERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(grader: Grader | None = None, timeout_s: float = 0.5, processes: int = 2) -> Config:
    return Config(
        name="test",
        model=Model(path="none"),
        data=Data(train=[JsonLines(path="none.jsonl")]),
        max_steps=1,
        reward=Reward(
            processes=processes,
            grader=grader or CustomGrader(function="graders_of_the_service:by_text"),
            timeout_s=timeout_s,
            timeout_reward=-1.0,
        ),
        services=Services(heartbeat_s=0.1, connect_s=20.0, ask_s=10.0, stop_s=5.0),
    )


def lease(group: int, *texts: str, version: int = 3) -> ScoreLease:
    members = [
        Trajectory(
            tokens=np.arange(400, dtype=np.int32),  # large enough to travel as a frame of its own
            action=np.ones(400, bool),
            logprobs=np.zeros(400, np.float32),
            versions=[(version, 400)],
            stop="eos",
            text=text,
        )
        for text in texts
    ]
    task = Task(index=group, source="tests", prompt="?")
    return ScoreLease(LeaseId(group, 0, "score"), task, list(enumerate(members)))


class ScriptedBuffer:
    """Grants the leases it was given, notes what comes back, and says when the run is over."""

    def __init__(self, *leases: ScoreLease) -> None:
        self.leases = deque(leases)
        self.acquired: list[Acquire] = []
        self.finished: list[Graded] = []
        self.extended: list[Extend] = []
        self.has_finished = asyncio.Event()
        self.revoke: set[int] = set()
        self.revoke_finishes_of: set[int] = set()
        self.ended: Callable[[], bool] = lambda: False

    async def handle(self, request: Any) -> Any:
        match request:
            case Acquire():
                self.acquired.append(request)
                if not self.leases:
                    await asyncio.sleep(0.05)
                    return Leases(ended=self.ended())
                return Leases(score=[self.leases.popleft()])
            case FinishScore(results=results):
                self.finished += results
                self.has_finished.set()
                groups = [result.lease.group for result in results]
                return LeaseReplies(
                    [LeaseReply("revoked" if group in self.revoke_finishes_of else "accepted") for group in groups]
                )
            case Extend():
                self.extended.append(request)
                return Extended([(i, "too old") for i, _ in request.leases if i.group in self.revoke], self.ended())
        raise AssertionError(f"a reward service sends no {type(request).__name__}")

    def scores_of(self, group: int) -> dict[int, tuple[float | None, str]]:
        return {f.member: (f.score.reward, f.score.status) for f in self.finished if f.lease.group == group}


def run(buffer: ScriptedBuffer, settings: Config, until: Callable[[RewardService], Any] | None = None) -> RewardService:
    """Run the service until it ends; `until` is awaited beside it."""

    async def main() -> RewardService:
        service = RewardService(settings, "reward-0")
        service.run.create()
        async with Mailbox("", "buffer", BufferRequest, BufferReply, buffer.handle) as mailbox:
            serving = asyncio.create_task(mailbox.serve())
            service.run.announce("buffer", mailbox.address)
            beside = asyncio.create_task(until(service)) if until else None
            await service.main()
            if beside is not None:
                await beside
            serving.cancel()
        return service

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_every_member_is_finished_with_its_score() -> None:
    """Field report 46: [1, 3, 2, failed] arrives with three votes; the failed one has none."""
    buffer = ScriptedBuffer(lease(7, "1", "3", "2", "die"), lease(8, "0.5", "hang"))
    buffer.ended = lambda: len(buffer.finished) == 6
    service = run(buffer, config())
    assert buffer.scores_of(7) == {
        0: (1.0, "graded"),
        1: (3.0, "graded"),
        2: (2.0, "graded"),
        3: (None, "failed"),
    }
    assert buffer.scores_of(8) == {0: (0.5, "graded"), 1: (-1.0, "timeout")}
    assert service.detail() == {"held": 0, "finished": 6}


def test_what_it_asks_for_is_what_its_processes_can_carry() -> None:
    buffer = ScriptedBuffer()
    buffer.ended = lambda: len(buffer.acquired) >= 2
    run(buffer, config(processes=2))
    first = buffer.acquired[0]
    assert (first.stage, first.n, first.version, first.worker) == ("score", 2 * 2 * 8, -1, "reward-0")


def test_it_takes_no_more_than_it_can_carry() -> None:
    full = ["hang"] * 8
    buffer = ScriptedBuffer(lease(1, *full), lease(2, *full), lease(3, *full))
    buffer.ended = lambda: len(buffer.extended) >= 10
    run(buffer, config(timeout_s=30.0, processes=1))
    assert [len(buffer.leases), [a.n for a in buffer.acquired]] == [1, [16, 8]]


def test_it_says_at_each_heartbeat_what_it_holds() -> None:
    buffer = ScriptedBuffer(lease(1, "hang", version=5), lease(2, "1"))
    buffer.ended = lambda: len(buffer.extended) >= 6
    run(buffer, config(timeout_s=30.0))
    assert buffer.extended[-1].leases == [(LeaseId(1, 0, "score"), 5)]
    stats = buffer.extended[-1].stats
    assert stats.finished == 1
    assert 0.0 < stats.busy_s <= stats.up_s
    assert len({e.incarnation for e in buffer.extended} | {a.incarnation for a in buffer.acquired}) == 1


def test_heartbeats_go_on_while_a_reward_sleeps() -> None:
    """Field report 45: for 2 s, with a heartbeat every 0.1 s. Each late by 100 ms would make 10 of the 20."""
    buffer = ScriptedBuffer(lease(1, "sleep"))
    buffer.ended = lambda: bool(buffer.finished)
    run(buffer, config(timeout_s=30.0))
    assert buffer.scores_of(1) == {0: (1.0, "graded")}
    assert len([beat for beat in buffer.extended if beat.leases]) > 10


def test_revoked_work_is_dropped_and_its_process_is_free_again() -> None:
    buffer = ScriptedBuffer(lease(1, "hang"), lease(2, "4"))
    buffer.revoke = {1}
    buffer.ended = lambda: bool(buffer.scores_of(2)) and buffer.extended[-1].leases == []
    run(buffer, config(timeout_s=30.0, processes=1))
    assert buffer.scores_of(1) == {}
    assert buffer.scores_of(2) == {0: (4.0, "graded")}


def test_a_finish_that_is_answered_revoked_drops_the_rest_of_the_lease() -> None:
    buffer = ScriptedBuffer(lease(1, "1", "hang"))
    buffer.revoke_finishes_of = {1}
    buffer.ended = lambda: bool(buffer.finished) and buffer.extended[-1].leases == []
    run(buffer, config(timeout_s=30.0))
    assert buffer.scores_of(1) == {0: (1.0, "graded")}


def test_a_stop_finishes_what_is_held_and_takes_nothing_more() -> None:
    buffer = ScriptedBuffer(lease(1, "1", "hang"))

    async def stop(service: RewardService) -> None:
        await buffer.has_finished.wait()
        service.stopping.set()

    run(buffer, config(timeout_s=1.0), until=stop)
    assert buffer.scores_of(1) == {0: (1.0, "graded"), 1: (-1.0, "timeout")}


def test_an_unknown_grader_ends_the_service_before_it_takes_a_lease(folder: Path) -> None:
    """Exit status 2, and the reason is the last line; no buffer is needed to find it out."""
    (folder / "service.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_reward_service import CustomGrader, RewardService, config\n"
        "from async_rl.actor.service import run_service\n"
        "settings = config(CustomGrader(function='graders_of_the_service:by_tex'))\n"
        "sys.exit(run_service(RewardService(settings, 'reward-0')))\n"
    )
    done = subprocess.run([sys.executable, "service.py"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert "has no 'by_tex' (did you mean 'by_text'?)" in done.stderr.splitlines()[-1]
