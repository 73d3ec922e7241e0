import signal
from pathlib import Path

import pytest

from async_rl.cli.main import parse as parse_command
from async_rl.config import Config, parse
from async_rl.evaluation import pass_at_k
from async_rl.protocol.buffer import BufferReport, WorkerStats
from async_rl.protocol.control import ServiceStatus
from async_rl.supervisor.children import last_error
from async_rl.supervisor.report import Rates, live_text
from async_rl.supervisor.roster import STOP_ORDER, roster
from async_rl.supervisor.supervisor import stop_signals
from async_rl.supervisor.verdict import verdict


def config(**settings: object) -> Config:
    tree = {
        "name": "n",
        "max_steps": 3,
        "model": {"path": "m"},
        "data": {"train": [{"kind": "jsonl", "path": "t"}]},
    }
    return parse(tree | settings)


@pytest.mark.parametrize(
    ("service", "status", "ending", "deaths", "expected"),
    [
        ("trainer", 0, False, 1, "over"),
        ("trainer", 1, False, 1, "fatal"),
        ("trainer", -9, False, 1, "fatal"),
        ("buffer", 0, False, 1, "fatal"),
        ("buffer", -9, False, 1, "fatal"),
        ("rollout", -9, False, 1, "restart"),
        ("rollout", 1, False, 8, "restart"),
        ("rollout", 1, False, 9, "fatal"),
        ("rollout", 2, False, 1, "fatal"),
        ("reward", 0, False, 1, "restart"),
        ("weight-sync", -11, False, 1, "restart"),
        ("rollout", -9, True, 99, "ignore"),
        ("trainer", 1, True, 1, "ignore"),
    ],
)
def test_what_the_end_of_a_process_means(service: str, status: int, ending: bool, deaths: int, expected: str) -> None:
    found = verdict(service, status, ending=ending, deaths_in_a_row=deaths, max_failures=8, journal=False)
    assert found == expected


@pytest.mark.parametrize("service", ["buffer", "trainer"])
@pytest.mark.parametrize(("status", "deaths", "journal", "expected"), [
    (-9, 1, True, "restart"),
    (-9, 9, True, "fatal"),
    (-9, 1, False, "fatal"),
    (1, 1, True, "fatal"),
    (2, 1, True, "fatal"),
])  # fmt: skip
def test_a_killed_buffer_or_trainer_is_started_anew_where_there_is_a_journal(
    status: int, deaths: int, journal: bool, expected: str, service: str
) -> None:
    found = verdict(service, status, ending=False, deaths_in_a_row=deaths, max_failures=8, journal=journal)
    assert found == expected


def test_the_roster_has_every_service_and_each_can_be_stopped() -> None:
    roles = roster(config(rollout={"workers": 2}, reward={"workers": 3}))
    names = [role.name for role in roles]
    assert names == [
        "buffer",
        "weight_sync",
        "trainer",
        "rollout-0",
        "rollout-1",
        "reward-0",
        "reward-1",
        "reward-2",
    ]
    assert {role.service for role in roles} == set(STOP_ORDER)
    assert roles[4].command(Path("run.toml"))[-5:] == ["serve", "rollout", "run.toml", "--index", "1"]


def test_compute_threads_come_from_the_configuration() -> None:
    roles = {role.name: role for role in roster(config(trainer={"threads": 4}, rollout={"threads": 2}))}
    assert roles["trainer"].environment()["OMP_NUM_THREADS"] == "4"
    assert roles["rollout-0"].environment()["OMP_NUM_THREADS"] == "2"
    assert roles["buffer"].environment()["OMP_NUM_THREADS"] == "1"


def test_the_last_error_of_a_log_is_found_without_its_time_stamp(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(
        "2026-01-01 00:00:00,000 INFO x\nTraceback (most recent call last):\n"
        "2026-01-01 00:00:01,000 ERROR trainer: error: no such file\n"
    )
    assert last_error(log, "none") == "trainer: no such file"
    assert last_error(tmp_path / "absent.log", "none") == "none"


def report(tokens: int, up: float, busy: float) -> BufferReport:
    return BufferReport(
        version=0, admitted=0, held=0, trained=0, dropped={}, failed={}, states={}, conserved=True, lapsed=0, tokens=0,
        workers={"rollout-0": WorkerStats(up_s=up, busy_s=busy, tokens=tokens), "reward-0": WorkerStats(up_s=up)},
        worker_versions={}, oldest_lease="", ended=False,
    )  # fmt: skip


def test_rates_are_of_the_time_since_the_last_look() -> None:
    rates = Rates()
    assert rates.update(10.0, report(100, 5.0, 5.0)) == (0.0, 0.0)
    assert rates.update(12.0, report(300, 7.0, 6.5)) == (100.0, 0.25)


def test_the_live_line_leaves_out_what_is_not_known_yet() -> None:
    status = ServiceStatus(service="trainer", pid=1, uptime_s=1.0, version=0, detail={"step": 0})
    assert live_text(12, status, (0.0, 0.0)).startswith("step 0/12 | v0 | tokens/s")
    detail: dict[str, float | int | str] = {
        "step": 7,
        "reward": 0.5,
        "held_out": 0.6,
        "lag_mean": 1.2,
        "lag_max": 2,
        "mismatch_kl": 3e-4,
    }
    text = live_text(12, ServiceStatus(service="trainer", pid=1, uptime_s=1.0, version=7, detail=detail), (100.0, 0.1))
    for part in (
        "step 7/12",
        "reward 0.500",
        "held-out 0.600",
        "v7",
        "lag 1.20 (max 2)",
        "100 generated",
        "rollouts 10%",
        "3.00e-04",
    ):
        assert part in text


def test_a_run_leads_with_reward_and_mismatch_and_never_with_the_loss() -> None:
    """Field report 51."""
    detail: dict[str, float | int | str] = {"step": 1, "reward": 0.5, "policy_loss": 0.0, "mismatch_kl": 3e-4}
    text = live_text(12, ServiceStatus(service="trainer", pid=1, uptime_s=1.0, version=1, detail=detail), (0.0, 0.0))
    assert text.startswith("step 1/12 | reward 0.500") and text.endswith("mismatch KL 3.00e-04")
    assert "loss" not in text
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert "The policy loss is in the metrics and is no sign of progress" in readme


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 0, 2, 0.0), (4, 4, 1, 1.0), (4, 1, 1, 0.25), (4, 2, 2, 1 - 1 / 6), (2, 1, 2, 1.0)],
)
def test_pass_at_k_is_unbiased(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_refuses_more_draws_than_samples() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "--quiet", "seed=1", "mode=sync"],
        ["train", "--quiet", "run.toml", "seed=1", "mode=sync"],
        ["train", "run.toml", "seed=1", "--quiet", "mode=sync"],
    ],
)
def test_overrides_stand_anywhere_on_the_command_line(words: list[str]) -> None:
    options = parse_command(words)
    assert (options.run, options.quiet, options.overrides) == ("run.toml", True, ["seed=1", "mode=sync"])


@pytest.mark.parametrize(
    "words", [["train", "run.toml", "--quite"], ["train", "run.toml", "--quiet", "sync"], ["trian"]]
)
def test_a_word_the_command_line_does_not_know_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_command(words)
    assert end.value.code == 2
    assert capsys.readouterr().err


def test_a_terminal_that_closes_stops_the_run_unless_that_is_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
