"""A child process: it does not outlive its parent, goes before it when memory runs out, and has
bounded memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None) -> None:
    """Have the kernel kill this process when `parent`, the id of the process that started it, ends
    in any way.

    Kills it at once if `parent` has ended already. Does nothing without a `parent`, and on other
    systems than Linux.
    """
    if parent is None or sys.platform != "linux":
        return
    # Called by the child itself: code between fork and exec would run with the locks of the
    # parent's other threads.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def go_first() -> None:
    """Have the kernel choose this process when memory runs out, not the process that started it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def bound_memory(max_bytes: int, *, maps_files: bool = False) -> None:
    """Let this process grow by at most `max_bytes` of addresses from now on, and leave no core when
    it aborts.

    With `maps_files` files that it maps for reading do not count. Does nothing on a system without
    /proc, and if a service's own limit is lower.
    """
    kind, column = (resource.RLIMIT_DATA, 5) if maps_files else (resource.RLIMIT_AS, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + max_bytes
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
