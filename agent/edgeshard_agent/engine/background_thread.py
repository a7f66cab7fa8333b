"""A thread next to the compute thread, for slow work that must not delay a step."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgeshard_agent.engine.worker import ComputeThread

T = TypeVar("T")
NICE = 5
"""On a core that a step uses too, such a thread gets a quarter. A lower priority would be worse:
the thread holds Python's lock at times, and other threads would wait for it."""


class _Stopped(Exception):
    """Raised in work whose result is no longer needed."""


class BackgroundThread:
    """One thread of a low priority, with one core of torch's. Cancelled work stops at its next check."""

    def __init__(self, worker: ComputeThread) -> None:
        self._worker = worker
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[Callable[[], None]], T]) -> T:
        """`work` gets a function that it must call now and then."""
        if self._executor is None:
            # The number of torch's threads goes over from the newest thread that set it to threads that begin after.
            await self._worker.run(lambda: None)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aside", initializer=_prepare)
        stopped = threading.Event()

        def go_on() -> None:
            if stopped.is_set():
                raise _Stopped

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, go_on)
        except asyncio.CancelledError:
            stopped.set()
            raise


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
