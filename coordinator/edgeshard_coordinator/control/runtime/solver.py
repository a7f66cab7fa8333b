"""The threads that compute placements, off the event loop, without a delay of the process's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")

SOLVES_AT_ONCE = 4
"""More than this wait, because each keeps a processor busy until it is done."""


class Solver:
    """Pure work in daemon threads: the process ends without waiting for them, as it would for
    asyncio's own."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(SOLVES_AT_ONCE)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread, and return or raise as it does."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = loop.create_future()

        def settle(result: ResultT | None, error: Exception | None) -> None:
            # Not earlier: cancelled work still uses a processor.
            self._places.release()
            if answer.done():
                return  # The caller has gone.
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # The loop is closed: so is everything else.
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=call, name="solver", daemon=True).start()
        return await answer
