"""What a stream begins with, within a limit: a caller that says nothing must not hold a stream for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from edgeshard.domain.errors import DeadlineError
from edgeshard_agent.net.task_group import heed

FIRST_REQUEST_S = 5.0


async def first_request(context: Any, what: str) -> Any:
    """The first message of a stream, grpc.aio.EOF if there is none. Raises DeadlineError after `FIRST_REQUEST_S`.

    The read itself is never cancelled, which gRPC does not take well; it ends with the call.
    """

    async def read() -> Any:
        return await context.read()

    reading = asyncio.create_task(read(), name=f"await-{what}")
    reading.add_done_callback(heed)
    await asyncio.wait({reading}, timeout=FIRST_REQUEST_S)
    if reading.done():
        return reading.result()
    raise DeadlineError(f"no {what} came within {FIRST_REQUEST_S:.0f} s", field=what, reason="NOTHING_SAID")
