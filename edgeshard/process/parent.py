"""A child that does not outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None) -> None:
    """From now on the kernel kills this process when `parent`, the process id of what started it, ends in any way.

    Kills it at once where that has ended already. Nothing without a `parent`, and where there is no Linux.
    """
    if parent is None or sys.platform != "linux":
        return
    # Asked by the child itself: code between fork and exec would run beside the locks of the parent's other threads.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
