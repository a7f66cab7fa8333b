"""When a daemon may say that it gets on: only if each of its parts did something since it said so last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from edgeshard.process.notify import Notifier

log = structlog.get_logger()

BEATS = 3
"""Looks in the watchdog's time, so that one or two may come late on a busy machine."""


class Progress:
    """Counts of what each part has done so far, by the part's name, from look to look. Pure.

    A part that has nothing to do must count that it looked. The event loop needs no count: it is what looks.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._before = dict(counts)

    def stuck(self, counts: Mapping[str, int]) -> list[str]:
        """The parts that have done nothing since the last look."""
        before, self._before = self._before, dict(counts)
        return [name for name, count in counts.items() if count == before.get(name)]


async def feed_watchdog(notifier: Notifier, counts: Callable[[], Mapping[str, int]]) -> None:
    """Beat from the event loop for as long as every count grows. Returns at once where nobody watches."""
    if notifier.watchdog_s is None:
        return
    progress, stuck = Progress(counts()), list[str]()
    while True:
        await asyncio.sleep(notifier.watchdog_s / BEATS)
        before, stuck = stuck, progress.stuck(counts())
        if not stuck:
            notifier.beat()
        if stuck != before:
            log.error("no_progress", parts=stuck) if stuck else log.info("progress_again", parts=before)
            notifier.status(f"no progress: {', '.join(stuck)}" if stuck else "serving")
