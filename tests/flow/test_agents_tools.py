"""Tools: schemas from hints, deadlines kept from outside, a sandbox for the policy's code."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from async_rl.agents.llm import Call
from async_rl.agents.processes import Processes
from async_rl.agents.sandbox import run_python
from async_rl.agents.tools import Tool, carry_out, named
from async_rl.errors import UserError
from tests.flow import agent_tools
from tests.flow.ring import alive, until

PLACE = "tests.flow.agent_tools"


def call(name, arguments=None, problem=""):
    return Call("c00000000", name, arguments, "", problem)


def answers(*calls, deadline_s=20.0, tools=("add", "nap", "fail", "die", "shout", "pick", "wait")):
    async def work():
        pool = Processes(2)
        try:
            by_name = {tool.name: tool for tool in named([f"{PLACE}:{name}" for name in tools], pool)}
            async with asyncio.timeout(60):
                return [await carry_out(one, by_name, deadline_s) for one in calls]
        finally:
            await pool.close()

    return [(message["content"], use.status) for message, use in asyncio.run(work())]


def test_a_schema_comes_from_the_hints_and_the_docstring():
    tool = Tool.of(agent_tools.pick, Processes(1))
    function = tool.spec["function"]
    assert function["name"] == "pick" and function["description"] == "Counts."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "level": {"type": "integer", "minimum": 1, "maximum": 3, "description": "how much"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["level", "tags"],
        "additionalProperties": False,
    }
    assert Tool.of(agent_tools.add, Processes(1)).spec["function"]["parameters"]["required"] == ["a"]


def test_tools_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="has no type hint"):
        Tool.of(eval("lambda x: x"))

    def inner(x: int) -> int:
        return x

    with pytest.raises(UserError, match="must be in a module"):
        Tool.of(inner, Processes(1))
    with pytest.raises(UserError, match="named arguments alone"):
        Tool.of(print_all)


async def print_all(*texts: str) -> None: ...


def test_answers_errors_and_arguments_that_do_not_fit():
    given = answers(
        call("add", {"a": 2}),
        call("add", {"a": "two"}),
        call("add", {"a": 1, "c": 2}),
        call("pick", {"level": 2, "tags": ["x"]}),
        call("fail", {"why": "no luck"}),
        call("die", {}),
        call("shout", {"text": "loud"}),
        call("wait", {"seconds": 0.01}),
        call("missing", {}),
    )
    assert given[0] == ("3", "ok")
    assert given[1][1] == "malformed" and "int" in given[1][0]
    assert given[2][1] == "malformed" and "`c`" in given[2][0]
    assert given[3] == ('{"x": 2}', "ok")
    assert given[4] == ("error: ToolRaised: RuntimeError: no luck", "error")
    assert given[5][1] == "error" and "ended by itself" in given[5][0]
    assert given[6] == ("LOUD", "ok")
    assert given[7] == ("done", "ok")
    assert given[8][1] == "malformed" and "there is add, die" in given[8][0]


@pytest.mark.parametrize("raw", ['{"cmd": "ls"', "null", "[1]", '{"a":1}{"a":1}'])
def test_malformed_arguments_are_answered(raw):
    """Field report 39."""
    from async_rl.agents.parsers import hermes, mistral

    for turn in (
        hermes(f'<tool_call>{{"name": "add", "arguments": {raw}}}</tool_call>'),
        mistral(f"[TOOL_CALLS]add[ARGS]{raw}"),
    ):
        (one,) = turn.calls
        ((answer, status),) = answers(one)
        assert status == "malformed" and answer.startswith("error: "), turn


def test_a_deadline_is_kept_from_outside_and_leaves_no_process(tmp_path):
    """Field report 41: the tool sleeps 3600 s, the limit is 1 s."""
    note = tmp_path / "pid"
    began = time.monotonic()
    ((answer, status),) = answers(call("nap", {"seconds": 3600, "note": str(note)}), deadline_s=2.0)
    assert status == "timeout" and "longer than 2 s" in answer
    assert time.monotonic() - began < 30
    until(lambda: not alive(int(note.read_text())), "the end of the tool's process")
    assert answers(call("wait", {"seconds": 3600}), deadline_s=0.2)[0][1] == "timeout"


def test_a_hanging_tool_takes_no_place_from_the_others():
    calls = [call("nap", {"seconds": 3600}) for _ in range(3)]
    given = answers(*calls, call("add", {"a": 1}), deadline_s=1.5)
    assert [status for _, status in given[:3]] == ["timeout"] * 3
    assert given[3] == ("2", "ok")


# --- the sandbox -------------------------------------------------------------------------------------


def ran(code, **limits):
    return asyncio.run(run_python(code, **limits))


def test_what_a_program_prints_and_how_it_ends():
    assert ran("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in ran("1 / 0") and "[exit status 1]" in ran("1 / 0")
    assert ran("import os; print(os.listdir())") == "['code.py']\n"


def test_a_program_is_ended_with_what_it_started():
    began = time.monotonic()
    code = """
import subprocess, sys, os
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
print(child.pid, flush=True)
import time; time.sleep(3600)
"""
    out = ran(code, timeout_s=1.5)
    assert "[ended after 1.5 s]" in out
    assert time.monotonic() - began < 20
    until(lambda: not sleepers(), "the end of what it started")


def sleepers():
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and "time.sleep(3600)" in (entry / "cmdline").read_text():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_limits_on_memory_files_and_output():
    assert "MemoryError" in ran("x = bytearray(2**31)", memory_bytes=2**29)
    assert "File too large" in ran("open('f', 'w').write('x' * 2**21)", file_bytes=2**20)
    assert "left out" in ran("print('x' * 10**6)")


@pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="no network namespaces here")
def test_no_network_where_the_kernel_allows():
    code = "import socket; s = socket.socket(); s.settimeout(1); s.connect(('127.0.0.1', PORT))"
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        out = ran(code.replace("PORT", str(server.getsockname()[1])))
    import ctypes

    pid = os.fork()
    if not pid:
        os._exit(0 if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0 else 1)
    allowed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ("unreachable" in out or "Errno" in out) == allowed
