"""Writes to a stream that begin in the turn of the event loop in which there is something to write.

A task that is woken to write begins a turn later, which is a tenth of a millisecond while the
caches hold weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Write = Coroutine[Any, Any, None]


class PromptWriter:
    """Runs the writes that `next_write` returns, one after the other, until it returns None; `poke`
    has it ask again.

    A write is the coroutine of a gRPC call, which hands its message over before it waits for the
    first time. So the first one is under way when `poke` returns. It runs in no task: it may wait
    only for futures, and is not cancelled but dropped. The error of a write is passed to `failed`,
    and nothing is written after it.
    """

    def __init__(
        self, next_write: Callable[[], Write | None], failed: Callable[[BaseException], None]
    ) -> None:
        self._next_write = next_write
        self._failed = failed
        self._writing: Write | None = None
        self._closed = False

    def poke(self) -> None:
        """There may be something to write."""
        while not self._closed and self._writing is None:
            try:
                self._writing = self._next_write()
            except Exception as error:
                self._fail(error)
                return
            if self._writing is None:
                return
            self._go_on(self._writing)

    def close(self) -> None:
        """Write nothing more. gRPC ends the current write."""
        self._closed = True
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    def _go_on(self, write: Write) -> None:
        """Run a write until it waits or ends."""
        try:
            waits_for = write.send(None)
        except StopIteration:
            self._writing = None
        except (Exception, asyncio.CancelledError) as error:
            self._fail(error)
        else:
            if waits_for is None:  # as `asyncio.sleep(0)` does
                asyncio.get_running_loop().call_soon(self._woken, write)
            else:
                # Clear it, as a task does with the future that its coroutine waits for.
                waits_for._asyncio_future_blocking = False
                waits_for.add_done_callback(lambda _: self._woken(write))

    def _woken(self, write: Write) -> None:
        if self._writing is write:
            self._go_on(write)
            self.poke()

    def _fail(self, error: BaseException) -> None:
        self._closed, self._writing = True, None
        self._failed(error)
