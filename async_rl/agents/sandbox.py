"""Python code of the policy, in a process that can do little: limits on time, memory, files and processes; a folder of
its own; where the kernel allows, no network and no sight of other processes.

The deadline is kept from outside: the whole process group gets SIGKILL. This holds off accidents and small tricks, not
an attacker with a kernel exploit; run the rollout service in a container for that.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

OUTPUT_BYTES = 20_000

# Runs before the policy's code. unshare: a user, network and process namespace of its own (Linux, where allowed).
LAUNCHER = """
import ctypes, os, resource, runpy, signal, sys
cpu, memory, files, code = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
uid, gid = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL)
if hasattr(libc, "unshare") and libc.unshare(0x10000000 | 0x40000000 | 0x20000000) == 0:
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass
    child = os.fork()  # the first process of the namespace: when it ends, all in it end
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    libc.prctl(1, signal.SIGKILL)
for kind, limit in (("CPU", cpu), ("AS", memory), ("FSIZE", files), ("CORE", 0), ("NOFILE", 64), ("NPROC", 256)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
sys.argv[:] = [code]
runpy.run_path(code, run_name="__main__")
"""


async def run_python(code: str, *, timeout_s: float = 10.0, memory_bytes: int = 2**30, file_bytes: int = 2**24) -> str:
    """What `code` prints, errors included, cut at OUTPUT_BYTES; at the deadline what there is, and a line that says
    so."""
    with tempfile.TemporaryDirectory(prefix="async-rl-sandbox-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "code.py"
        path.write_text(code, encoding="utf-8", errors="replace")
        limits = [str(max(1, int(timeout_s) + 1)), str(memory_bytes), str(file_bytes)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", LAUNCHER, *limits, str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        printed, ending = bytearray(), ""
        try:
            async with asyncio.timeout(timeout_s):
                assert process.stdout is not None
                while chunk := await process.stdout.read(4096):
                    printed += chunk[: OUTPUT_BYTES - len(printed)]
                await process.wait()
        except TimeoutError:
            ending = f"\n[ended after {timeout_s:g} s]"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if not ending and process.returncode:
        ending = f"\n[exit status {process.returncode}]"
    if len(printed) >= OUTPUT_BYTES:
        ending = f"\n[output over {OUTPUT_BYTES} bytes left out]{ending}"
    return printed.decode(errors="replace").replace(folder + "/", "") + ending


async def python(code: str) -> str:
    """Run a Python program and read what it prints."""
    return await run_python(code)
