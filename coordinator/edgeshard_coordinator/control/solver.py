"""Where placements are computed: beside the event loop, and not in the way of the process's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")

SOLVES_AT_ONCE = 4
"""More of them wait: each is at work with a processor for as long as it takes."""


class Solver:
    """Pure work in threads that nobody waits for when the process ends, as asyncio's own would be for many seconds."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(SOLVES_AT_ONCE)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns or raises."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ResultT] = loop.create_future()

        def settle(result: ResultT | None, error: Exception | None) -> None:
            # Not before: work that nobody waits for any more still has a processor.
            self._places.release()
            if answer.done():
                return  # Whoever asked has gone.
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
