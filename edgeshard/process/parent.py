"""A child that does not outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None) -> None:
    """Have the kernel kill this process when `parent`, the id of the process that started it, ends in any way.

    Kills it at once where `parent` has ended already. Does nothing without a `parent`, and on other systems than Linux.
    """
    if parent is None or sys.platform != "linux":
        return
    # Asked by the child itself: code between fork and exec would run beside the locks of the parent's other threads.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
