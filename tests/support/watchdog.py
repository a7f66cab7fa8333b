"""Measure the processor time of each callback of this process's event loops.

A message or a body may occupy a loop's thread for `LIMIT_S`. The processor time of the thread
counts, so a busy machine changes no result; but a thread that waits for the interpreter's lock
waits unseen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

LIMIT_S = 0.25
MAX_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class SlowCallback:
    """A callback that took `took_s` of its thread's processor time; `name` is that of its function
    or coroutine."""

    name: str
    took_s: float

    def __str__(self) -> str:
        return f"{self.name} took {self.took_s:.3f} s of processor time"


@dataclass(eq=False)
class Watchdog:
    """The callbacks beyond the limit, the first `MAX_REMEMBERED` of them, and sums of all callbacks
    in seconds."""

    limit_s: float = LIMIT_S
    callbacks: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    longest: str = ""
    slow: list[SlowCallback] = field(default_factory=list)

    def note(self, handle: asyncio.Handle, took_s: float) -> None:
        self.callbacks += 1
        self.total_s += took_s
        if took_s > self.longest_s:
            self.longest_s = took_s
            self.longest = name_of(handle)
        if took_s > self.limit_s and len(self.slow) < MAX_REMEMBERED:
            self.slow.append(SlowCallback(name_of(handle), took_s))

    def check(self) -> None:
        """Raise AssertionError naming the callbacks beyond the limit, if there is one."""
        assert not self.slow, "; ".join(map(str, self.slow))


def name_of(handle: asyncio.Handle) -> str:
    """The function that a handle calls; for a step of a task the coroutine."""
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        callback = owner.get_coro()
    return str(getattr(callback, "__qualname__", None) or type(callback).__qualname__)


@contextmanager
def watching(limit_s: float = LIMIT_S) -> Iterator[Watchdog]:
    """Watch all loops of this process meanwhile. It costs each callback two readings of the
    thread's clock."""
    watchdog = Watchdog(limit_s)
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        try:
            run(handle)
        finally:
            watchdog.note(handle, time.thread_time() - began)

    with mock.patch.object(asyncio.Handle, "_run", measured):
        yield watchdog
