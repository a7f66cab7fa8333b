"""The processor's time of each callback of an event loop, so that a busy machine counts for
nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class CallbackWatch:
    """`longest_s` is the longest time of a callback so far, in seconds of this thread's processor
    time."""

    longest_s: float = 0.0


@contextmanager
def watched_callbacks() -> Iterator[CallbackWatch]:
    """A watch of all callbacks that run in this thread meanwhile."""
    watch = CallbackWatch()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        watch.longest_s = max(watch.longest_s, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
