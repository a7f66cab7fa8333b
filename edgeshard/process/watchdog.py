"""The watchdog of a daemon: it beats only if each part of the daemon did something since the last beat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from edgeshard.process.notify import Notifier

log = structlog.get_logger()

BEATS = 3
"""Checks in the watchdog's time, so that one or two may be late on a busy machine."""


class StallDetector:
    """Compares counts of the work of each part, by the part's name, from check to check. Pure.

    A part without work must count its checks. The event loop needs no count, since it makes them.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._before = dict(counts)

    def stuck(self, counts: Mapping[str, int]) -> list[str]:
        """The parts whose counts have not changed since the last check."""
        before, self._before = self._before, dict(counts)
        return [name for name, count in counts.items() if count == before.get(name)]


async def feed_watchdog(notifier: Notifier, counts: Callable[[], Mapping[str, int]]) -> None:
    """Beat from the event loop while every count grows. Returns at once without a watchdog."""
    if notifier.watchdog_s is None:
        return
    progress, stuck = StallDetector(counts()), list[str]()
    while True:
        await asyncio.sleep(notifier.watchdog_s / BEATS)
        before, stuck = stuck, progress.stuck(counts())
        if not stuck:
            notifier.beat()
        if stuck != before:
            log.error("progress_stalled", parts=stuck) if stuck else log.info("progress_resumed", parts=before)
            notifier.status(f"no progress: {', '.join(stuck)}" if stuck else "serving")
