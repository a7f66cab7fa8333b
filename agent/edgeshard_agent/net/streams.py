"""Parts of every stream: directions that end together, a first message within a limit, a status at
the end.

`Reconnecting` decides when a stream is tried again, and which failures are logged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import grpc

from edgeshard.domain.errors import DeadlineError

FIRST_REQUEST_S = 5.0
"""A silent caller must not hold a stream for ever."""


async def until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Run them side by side until the first ends, and raise its error; the others are cancelled and
    waited for."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end(task: asyncio.Task[None] | None, channel: grpc.aio.Channel | None) -> None:
    """Cancel the task of a stream, wait for its end, and close its channel, as far as there are
    any."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if channel is not None:
        await channel.close()


def heed(task: asyncio.Future[Any]) -> None:
    """A callback for a task or a future that may end without a waiting caller: it reads the error,
    so that asyncio does not report it.
    """
    if not task.cancelled():
        task.exception()


async def first_request(context: Any, what: str) -> Any:
    """The first message of a stream, grpc.aio.EOF if there is none. Raises DeadlineError after
    `FIRST_REQUEST_S`.

    The read itself is never cancelled, which gRPC does not take well; it ends with the call.
    """

    async def read() -> Any:
        return await context.read()

    reading = asyncio.create_task(read(), name=f"await-{what}")
    reading.add_done_callback(heed)
    await asyncio.wait({reading}, timeout=FIRST_REQUEST_S)
    if reading.done():
        return reading.result()
    raise DeadlineError(
        f"no {what} arrived within {FIRST_REQUEST_S:.0f} s", field=what, reason="NOTHING_SAID"
    )


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as its error."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )


RETRY_S = 0.3
MAX_RETRY_S = 0.5
PATIENCE_S = 300.0
MAX_PAUSE_S = 30.0
STEADY_S = 10.0
"""A connection that lasts as long ends an absence. One that breaks sooner is part of it."""
QUIET_S = 60.0
"""Between two lines about one absence, except for a new reason."""
MAX_REASONS = 16


class Reconnecting:
    """When an agent tries a peer again, and which failures it logs. Pure: times are arguments, in
    seconds.

    A coordinator that restarts is back within seconds, and requests wait for its nodes. So the
    pause stays short for `PATIENCE_S`. Then it doubles: a coordinator that is away for a day must
    not fill the disk of a node with lines.

    One absence of the coordinator after another. Until an absence has lasted, pauses go from
    `retry_s` to `max_retry_s`.
    """

    def __init__(self, retry_s: float = RETRY_S, max_retry_s: float = MAX_RETRY_S) -> None:
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._begin(None)

    def _begin(self, now: float | None) -> None:
        self._since = now
        self._pause_s = self._retry_s
        self._reasons: set[tuple[str, str]] = set()
        self._logged_at = float("-inf")
        self._back_at: float | None = None
        self._told_back_at = float("-inf")
        self._failures = 0

    def failed(self, now: float) -> float:
        """Note a failed try, or a connection that broke. Return the pause before the next try."""
        if self._back_at is not None and now - self._back_at >= STEADY_S:
            self._begin(now)
        self._back_at = None
        if self._since is None:
            self._since = now
        self._failures += 1
        pause_s = self._pause_s
        limit_s = self._max_retry_s if now - self._since < PATIENCE_S else MAX_PAUSE_S
        self._pause_s = min(2 * pause_s, limit_s)
        return pause_s

    def is_news(self, reason: str, message: str, now: float) -> bool:
        """Whether to log a failure: the first of its kind in this absence, or the first for a
        minute."""
        kind = (reason, re.sub(r"\d+", "0", message))
        if (
            kind in self._reasons or len(self._reasons) >= MAX_REASONS
        ) and now - self._logged_at < QUIET_S:
            return False
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(kind)
        self._logged_at = now
        return True

    def told(self) -> int:
        """The failures since the last line about one. The next call counts from here."""
        failures, self._failures = self._failures, 0
        return failures

    def came_back(self, now: float) -> bool:
        """Note that the coordinator took the node. Return whether to log it: it may come and go
        within seconds."""
        self._back_at = now
        self._pause_s = min(self._pause_s, self._max_retry_s)
        if now - self._told_back_at < QUIET_S:
            return False
        self._told_back_at = now
        return True
