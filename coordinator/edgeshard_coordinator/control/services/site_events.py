"""The newest events of the site, in memory, and the streams that follow them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from edgeshard.domain.control.site import MOST_EVENTS, SiteEvent
from edgeshard.domain.errors import EdgeShardError
from edgeshard_coordinator.core.machine.site_events import news
from edgeshard_coordinator.core.values.state import State


class SiteEvents:
    """`note` every change of the state, from the event loop's thread. A coordinator that ends
    forgets them."""

    def __init__(self) -> None:
        self._events: deque[SiteEvent] = deque(maxlen=MOST_EVENTS)
        self._last = 0
        self._changed = asyncio.Event()
        self._closed: EdgeShardError | None = None

    def note(self, before: State, after: State) -> None:
        for item in news(before, after):
            self._last += 1
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._events.append(
                SiteEvent(
                    self._last, time, item.subject, item.name, item.what, item.detail, item.warning
                )
            )
            self._changed.set()

    def newest(self, count: int) -> tuple[SiteEvent, ...]:
        """The oldest first."""
        return tuple(self._events)[-count:] if count else ()

    async def follow(self, count: int) -> AsyncGenerator[SiteEvent, None]:
        """The newest `count`, then each as it happens. A reader so slow that the ring passed it
        misses some."""
        last_number = self._last
        for event in self.newest(count):
            yield event
        while True:
            for event in [event for event in self._events if event.number > last_number]:
                last_number = event.number
                yield event
            if self._last == last_number:
                if self._closed is not None:
                    raise self._closed
                if self._changed.is_set():
                    # Each follower of it has been woken by now, or sees the number.
                    self._changed = asyncio.Event()
                await self._changed.wait()

    def close(self, why: EdgeShardError) -> None:
        """End the streams that follow."""
        self._closed = why
        self._changed.set()
