"""Parts of every stream: directions that end together, a first message within a limit, a status at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from edgeshard.domain.errors import DeadlineError

FIRST_REQUEST_S = 5.0
"""A silent caller must not hold a stream for ever."""


async def until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Run them side by side until the first ends, and raise its error; the others are cancelled and waited for."""
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
    """Cancel the task of a stream, wait for its end, and close its channel, as far as there are any."""
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
    raise DeadlineError(f"no {what} arrived within {FIRST_REQUEST_S:.0f} s", field=what, reason="NOTHING_SAID")


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as its error."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
