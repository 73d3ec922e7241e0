"""The life of a service process: how it ends, with which status, and what its log says last."""

import asyncio
import re
import signal
import socket

import pytest

from async_rl.actor.service import first_cause
from async_rl.actor.status import ask_once
from async_rl.errors import DeadlineExceeded, InvariantError
from async_rl.protocol.control import Done, GetStatus, ServiceStatus, Stop
from async_rl.protocol.weight_sync import NoNewer, Release, WeightSyncReply, WeightSyncRequest
from tests.flow.actor_material import Echo, Process, build, fetch, run, settings, until


def ended(process, limit_s=30):
    return process.popen.wait(timeout=limit_s)


def question(process, message, deadline_s=10.0):
    config = settings(process.rundir.path.parent)
    return ask_once(process.rundir, "weight_sync", "weight_sync", message, config, deadline_s)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_order_with_status_0_and_takes_the_announcement_back(tmp_path, number):
    # field report 54
    async def main():
        with Process("echo", tmp_path) as process:
            await until(process.announced)
            process.popen.send_signal(number)
            assert ended(process) == 0
            assert process.rundir.address("weight_sync") is None

    run(main())


def test_a_stop_message_is_answered_before_the_end_and_the_status_is_0(tmp_path):
    async def main():
        with Process("echo", tmp_path) as process:
            await until(process.announced)
            status = await question(process, GetStatus())
            assert isinstance(status, ServiceStatus)
            assert (status.service, status.pid) == ("weight_sync", process.pid)
            assert await question(process, Stop("enough")) == Done()
            assert ended(process) == 0

    run(main())


def test_a_question_to_nobody_ends_at_its_deadline(tmp_path):
    async def main():
        process = Process("echo", tmp_path)
        with pytest.raises(DeadlineExceeded, match=r"weight_sync \(it has announced no address\) to GetStatus"):
            await question(process, GetStatus(), deadline_s=0.3)

    run(main())


def test_a_service_whose_work_is_done_ends_with_status_0(tmp_path):
    with Process("returns", tmp_path) as process:
        assert ended(process) == 0
        assert not any("error" in line.lower() for line in process.lines())


def test_long_polls_are_cancelled_by_a_stop(tmp_path):
    async def main():
        with Process("echo", tmp_path) as process:
            await until(process.announced)
            other = Echo(settings(tmp_path), "test")
            async with other.remote("weight_sync", WeightSyncRequest, WeightSyncReply) as peer:
                asked = [asyncio.create_task(peer.ask(fetch(wait_s=500), wait_s=500)) for _ in range(5)]
                await asyncio.sleep(0.3)
                await peer.ask(Stop("enough"))
                assert await asyncio.to_thread(ended, process, 10) == 0
                for task in asked:
                    task.cancel()
            assert not any("error" in line.lower() for line in process.lines())

    run(main())


def test_an_error_of_the_user_is_one_last_line_and_status_2(tmp_path):
    with Process("fails", tmp_path) as process:
        assert ended(process) == 2
        assert process.lines()[-1].endswith("weight_sync: error: model.path = 'nowhere': no such folder")
        assert not any("Traceback" in line for line in process.lines())


def test_a_broken_invariant_is_a_traceback_one_last_line_and_status_1(tmp_path):
    # field report 8: a fatal error ends the process with a nonzero status
    with Process("breaks", tmp_path) as process:
        assert ended(process) == 1
        assert any("Traceback" in line for line in process.lines())
        assert process.lines()[-1].endswith("weight_sync: error: InvariantError: two and two are five")


def test_a_dead_handler_ends_the_service_with_its_error_as_last_line(tmp_path):
    async def main():
        with Process("echo", tmp_path) as process:
            await until(process.announced)
            other = Echo(settings(tmp_path), "test")
            async with other.remote("weight_sync", WeightSyncRequest, WeightSyncReply) as peer:
                await peer.tell(Release("defect", 1))
                assert await asyncio.to_thread(ended, process) == 1
            assert process.lines()[-1].endswith("error: ZeroDivisionError: a defect of the handler")

    run(main())


def test_work_that_ignores_the_stop_is_cancelled_after_stop_s(tmp_path):
    async def main():
        with Process("dawdles", tmp_path, "services.stop_s=0.3") as process:
            await until(process.announced)
            process.popen.terminate()
            assert ended(process) == 0
            assert any("services.stop_s" in line for line in process.lines())

    run(main())


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path):
    async def main():
        with Process("hangs", tmp_path, "services.stop_s=0.3") as process:
            await until(process.announced)
            process.popen.terminate()
            assert ended(process) == 1
            assert "services.stop_s = 0.3" in process.lines()[-1]

    run(main())


def test_a_port_in_use_is_one_last_line_and_status_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with Process("echo", tmp_path, f"services.weight_sync={address}") as process:
            assert ended(process) == 2
            said = f"weight_sync: error: services.weight_sync = '{address}': Address already in use"
            assert process.lines()[-1].endswith(said)


def test_a_public_address_is_refused_with_status_2(tmp_path):
    with Process("echo", tmp_path, "services.weight_sync=tcp://0.0.0.0:0") as process:
        assert ended(process) == 2
        assert "services bind to loopback only" in process.lines()[-1]


def test_the_port_of_a_killed_service_is_free_at_once(tmp_path):
    # field report 54: SIGINT, SIGTERM or a crash: ports reusable
    async def main():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        other = Echo(settings(tmp_path, weight_sync=address), "test")
        async with other.remote("weight_sync", WeightSyncRequest, WeightSyncReply) as peer:
            for k in range(3):
                with Process("echo", tmp_path, f"services.weight_sync={address}") as process:
                    await until(process.announced)
                    assert await peer.ask(fetch(k)) == NoNewer(k)
                    process.popen.send_signal(signal.SIGKILL)
                    process.popen.wait()

    run(main())


def test_a_service_of_another_run_is_not_taken_for_ours(tmp_path):
    async def main():
        with Process("echo", tmp_path / "theirs") as process:
            await until(process.announced)
            address = process.rundir.address("weight_sync")
            ours = Echo(settings(tmp_path / "ours", weight_sync=address, connect_s=0.5), "test")
            async with ours.remote("weight_sync", WeightSyncRequest, WeightSyncReply) as peer:
                with pytest.raises(Exception, match=re.escape(str(tmp_path / "theirs" / "ring"))):
                    await peer.ask(fetch())

    run(main())


def test_work_that_is_cancelled_although_nobody_asked_for_a_stop_is_a_defect(tmp_path):
    class Cancelled(Echo):
        async def work(self):
            raise asyncio.CancelledError

    with pytest.raises(InvariantError, match="although nobody asked"):
        run(Cancelled(settings(tmp_path), "weight_sync").main())


def test_the_first_plain_exception_is_the_cause():
    inner = ValueError("this one")
    assert first_cause(ExceptionGroup("outer", [ExceptionGroup("inner", [inner]), KeyError("x")])) is inner


def test_the_status_counts_refused_frames(tmp_path):
    async def main():
        service = build("echo", settings(tmp_path))
        task = asyncio.create_task(service.main())
        await until(lambda: service._mailbox is not None)
        service._mailbox.refused_frames = 3
        config = settings(tmp_path)
        status = await ask_once(service.run, "weight_sync", "weight_sync", GetStatus(), config, 10.0)
        assert status.refused_frames == 3
        service.stopping.set()
        await task

    run(main())
