"""What a user can get wrong is one clear line and exit status 2; what arrives broken harms no service."""

import signal
import socket
from pathlib import Path

import pytest
import zmq

from async_rl.rundir import RunDir
from tests.flow import ring

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ring.make_run(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.learning_rte=1e-3", "unknown key 'trainer.learning_rte' (did you mean 'learning_rate'?)"),
        ("data.train.0.path=trian.jsonl", "did you mean 'train.jsonl'"),
        ("services.buffer=tcp://0.0.0.0:5999", "services bind to loopback only"),
        ("services.buffer=tcp://127.0.0.1:port", "services.buffer = 'tcp://127.0.0.1:port' is no address"),
        ("batch.mini_batches=3", "batch.mini_batches = 3 does not divide batch.groups = 4"),
        ("rollout.max_in_flight=2", "rollout.max_in_flight = 2 holds no group"),
        ("staleness.reuse=2", "only mode 'off-policy'"),
        ("weight_sync.directory=/dev/shn", "weight_sync.directory = '/dev/shn': no such folder"),
        ("warmup.characters=abc", "warmup.characters lacks '=de'"),
        ("evaluation.every=2", ""),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_wrong_setting_is_one_line(folder: Path, command: str, override: str, said: str) -> None:
    if not said:  # the control: a right one is not refused
        assert ring.run("check", "run.toml", override, cwd=folder)[0] == 0
        return
    status, output = ring.run(command, "run.toml", override, cwd=folder)
    assert status == 2, output
    assert len(output.strip().splitlines()) == 1, output
    assert said in output
    assert not (folder / "models").exists()


def test_a_misspelt_key_in_the_file_is_refused_with_the_nearest(folder: Path) -> None:
    # Field report 53.
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("learning_rate", "learnign_rate"))
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 2
    assert output.strip().splitlines() == [output.strip()]
    assert "unknown key" in output
    assert "(did you mean 'learning_rate'?)" in output


def test_a_model_that_does_not_exist_is_named(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    start, end = text.index("[warmup]"), text.index("[data]")
    (folder / "run.toml").write_text(text[:start] + text[end:])
    status, output = ring.run("train", "run.toml", cwd=folder)
    assert status == 2
    assert output.strip().splitlines() == [output.strip()]
    assert "model.path = 'models/tiny': no such folder" in output


def test_a_port_in_use_is_named_by_its_setting(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        status, output = ring.run("train", "run.toml", f"services.buffer={address}", cwd=folder)
        assert status == 2
        assert f"services.buffer = '{address}': the port is in use" in output
        # The service itself says so, too.
        status, output = ring.run("serve", "buffer", "run.toml", f"services.buffer={address}", cwd=folder)
        assert status == 2
        assert address in output.strip().splitlines()[-1]
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "bufer", "run.toml"], "invalid choice: 'bufer'"),
        (["serve", "buffer", "run.toml", "--index", "1"], "a run has one buffer"),
        (["serve", "rollout", "run.toml", "--index", "-1"], "numbered from 0"),
        (["train", "rum.toml"], "did you mean 'run.toml'"),
        (["eval", "run.toml", "--checkpoint", "nowhere"], "no such folder"),
        (["eval", "run.toml", "--samples", "0"], "--samples 0"),
    ],
)
def test_a_wrong_command_line_is_refused(folder: Path, arguments: list[str], said: str) -> None:
    status, output = ring.run(*arguments, cwd=folder)
    assert status == 2, output
    assert said in output
    assert "Traceback" not in output


def test_a_malformed_frame_to_each_mailbox_is_one_line_and_the_run_goes_on(folder: Path) -> None:
    process = ring.start("train", "run.toml", "max_steps=40", cwd=folder)
    names = ["buffer", "weight_sync", "trainer", "rollout-0", "reward-0"]
    run = RunDir(folder / "runs" / "ring")
    try:
        ring.until(lambda: len(ring.steps(folder)) >= 1, "step 1")
        context = zmq.Context()
        for name in names:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(str(run.address(name)))
            for frames in ([b"garbage"], [b"\x93\x01\x02\x03", b"\xff" * 50], [b""]):
                dealer.send_multipart(frames)
                assert dealer.poll(5000), f"{name} gave no answer to {frames}"
                assert b"fault" in dealer.recv_multipart()[0]
            dealer.close(linger=0)
        context.destroy(linger=0)
    finally:
        status, output = ring.finish(process)
    assert status == 0, output
    for name in names:
        refusals = [line for line in (run.logs / f"{name}.log").read_text().splitlines() if "refused frame" in line]
        assert len(refusals) == 3, name
    assert "ended (" not in output


def test_ctrl_c_during_the_start_leaves_nothing(folder: Path) -> None:
    status, output = ring.run("warmup", "run.toml", cwd=folder)
    assert status == 0, output
    process = ring.start("train", "run.toml", cwd=folder)
    ring.until(lambda: (folder / "runs" / "ring" / "logs" / "buffer.log").exists(), "the first service")
    process.send_signal(signal.SIGINT)
    status, output = ring.finish(process, timeout=60)
    assert status == 130, output
    assert "Traceback" not in output
    assert ring.left_over(folder) == []
