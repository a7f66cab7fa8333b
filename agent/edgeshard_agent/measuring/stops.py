"""How often this process was stopped and continued: a timing across a stop does not count."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

Stops = Callable[[], int]
"""The number of stops so far. If it is equal before and after a piece of work, there was no stop in
between."""


def no_stops() -> int:
    """For a process that is never stopped."""
    return 0


def count_stops() -> Stops:
    """Begin to count. Call it on the main thread, where the count is exact: the kernel notifies
    that thread before it runs on.
    """
    count = 0

    def went_on(_: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGCONT, went_on)
    return lambda: count
