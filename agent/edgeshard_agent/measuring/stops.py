"""How often this process was stopped and went on: what was timed across a stop counts for nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

Stops = Callable[[], int]
"""The number of stops so far. Equal before and after a piece of work, there was none in between."""


def no_stops() -> int:
    """Of a process that nobody stops."""
    return 0


def count_stops() -> Stops:
    """Begin to count; on the main thread, where it is exact: the kernel tells that thread before it runs on."""
    count = 0

    def went_on(_: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGCONT, went_on)
    return lambda: count
