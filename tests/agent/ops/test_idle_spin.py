"""Cores kept awake: by threads of idle priority, for as long as was asked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import idle_spin, native_available

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(
        not (sys.platform == "linux" and native_available()), reason="native kernels on Linux only"
    ),
]

PATIENCE_S = 60


def idle_threads() -> dict[int, int]:
    """Nanoseconds that each thread of idle priority of this process has run."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        # Another thread of the process may end since it was listed.
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(int(thread.name)) != os.SCHED_IDLE:
                continue
            found[int(thread.name)] = int(
                (thread / "schedstat").read_text(encoding="ascii").split()[0]
            )
    return found


def until_awake(cores: int) -> dict[int, int]:
    """Ask again and again until so many threads have spun; other processes may want the cores
    meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    first: dict[int, int] = {}
    while time.monotonic() < deadline:
        idle_spin(0.05, cores)
        time.sleep(0.01)
        now = idle_threads()
        if len(now) == cores and all(
            now[thread] > first.get(thread, now[thread]) + 5_000_000 for thread in now
        ):
            return now
        first = first if len(first) == cores else now
    raise AssertionError("nothing spins")


def test_threads_of_idle_priority_spin_and_stop() -> None:
    until_awake(1)
    assert len(idle_threads()) == 1
    until_awake(2)
    deadline = time.monotonic() + PATIENCE_S
    before = idle_threads()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        after = idle_threads()
        if after == before:
            return
        before = after
    raise AssertionError("they spin for longer than they were asked to")


def test_a_process_that_is_forked_has_threads_of_its_own() -> None:
    code = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from edgeshard_agent.ops.native import idle_spin\n"
        "idle_spin(0.01, 1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    idle_spin(0.01, 1)\n"
        "    ends = time.monotonic() + 60\n"
        "    def idle(): return any(os.sched_getscheduler(int(t.name)) == os.SCHED_IDLE for t in "
        "Path('/proc/self/task').iterdir())\n"
        "    while not idle() and time.monotonic() < ends: time.sleep(0.01)\n"
        "    os._exit(0 if idle() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
