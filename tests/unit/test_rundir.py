import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import UserError
from async_rl.rundir import RunDir


def test_an_announced_address_is_found_and_withdrawn(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert run.address("buffer") is None
    run.announce("buffer", "tcp://127.0.0.1:5")
    assert (run.address("buffer"), run.pid("buffer"), run.services()) == (
        "tcp://127.0.0.1:5",
        os.getpid(),
        ["buffer"],
    )
    run.withdraw("buffer")
    assert run.address("buffer") is None


def test_a_damaged_announcement_counts_as_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    (tmp_path / "services" / "buffer.json").write_text("{half")
    assert run.address("buffer") is None


def test_a_service_runs_once_in_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    code = f"from async_rl.rundir import RunDir\nwith RunDir({str(run.path)!r}).claim('buffer'): pass"
    with run.claim("buffer"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert f"its buffer is running already (pid {os.getpid()})" in done.stderr
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_an_earlier_run_left_is_moved_never_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert run.set_aside_previous() is None
    for text in ("first", "second"):
        run.metrics.write_text(text)
        (run.checkpoints / "step-00000001").mkdir()
        moved = run.set_aside_previous()
        assert moved is not None
        assert (moved / "metrics.jsonl").read_text() == text
        assert (moved / "checkpoints" / "step-00000001").is_dir()
        assert not run.metrics.exists()
        assert run.checkpoints.is_dir()
    assert sorted(p.name for p in (run.path / "previous").iterdir()) == ["1", "2"]


def test_a_run_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        RunDir(tmp_path / "file" / "run").create()


def test_an_announced_service_runs_as_long_as_its_process(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert not run.running("trainer")
    code = f"from async_rl.rundir import RunDir\nRunDir({str(run.path)!r}).announce('trainer', 'tcp://127.0.0.1:1')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert run.address("trainer") is not None  # it was killed before it could take that back
    assert not run.running("trainer")
    with run.claim("trainer"):
        run.announce("trainer", "tcp://127.0.0.1:2")
        assert run.running("trainer")
    assert not run.running("trainer")  # its pid lives, as that of another process may


def test_a_run_is_unfinished_while_something_of_it_can_go_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert not run.unfinished
    (run.checkpoints / "step-00000001").mkdir()
    assert run.unfinished
    run.summary.write_text("{}")
    assert run.complete
    assert not run.unfinished


def test_a_complete_run_is_set_aside_as_a_whole_and_an_unfinished_one_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.journal.mkdir()
    (run.journal / "00000001.log").write_text("journal")
    run.metrics.write_text("metrics")
    run.set_aside_complete()
    assert run.unfinished
    run.summary.write_text("{}")
    with run.claim("trainer"):
        run.announce("trainer", "tcp://127.0.0.1:1")
        run.set_aside_complete()  # a trainer that has yet to close the buffer
        assert run.complete
        run.withdraw("trainer")
        run.set_aside_complete()  # one that has only just been started
    assert not run.complete
    aside = run.path / "previous" / "1"
    assert sorted(path.name for path in aside.iterdir()) == ["journal", "metrics.jsonl", "summary.json"]
    run.set_aside_complete()
    assert [path.name for path in (run.path / "previous").iterdir()] == ["1"]


def test_services_that_start_together_set_a_complete_run_aside_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.summary.write_text("{}")
    code = (
        f"from async_rl.rundir import RunDir\nrun = RunDir({str(run.path)!r})\n"
        "run.set_aside_complete()\nassert not run.complete\nrun.metrics.open('a').write('new\\n')"
    )
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert [path.name for path in (run.path / "previous").iterdir()] == ["1"]
    assert run.metrics.read_text() == "new\nnew\n"
