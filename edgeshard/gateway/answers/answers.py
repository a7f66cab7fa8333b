"""The answers of one HTTP request: several streams of tokens as one, ended when the client
leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from edgeshard.domain.errors import CancelledRequestError, EdgeShardError
from edgeshard.domain.requests.generation import Finished, GenerationEvent

ResultT = TypeVar("ResultT")

Opened = Callable[[], AsyncGenerator[GenerationEvent, None]]
"""The call that begins one answer."""
Answers = AsyncGenerator[tuple[int, GenerationEvent], None]
"""The events of all answers, each with its answer's number."""

_READ_AHEAD = 32
"""The events of one answer that wait while another's are written; later ones wait with the
request."""


async def answers(opened: Sequence[Opened], at_once: int) -> Answers:
    """The events of all answers, at most `at_once` of them running. Each ends with Finished, or an
    error ends all."""
    if len(opened) == 1:
        async with aclosing(opened[0]()) as events:
            async for event in events:
                yield 0, event
        return
    async with aclosing(_merged(opened, at_once)) as merged:
        async for item in merged:
            yield item


async def _merged(opened: Sequence[Opened], at_once: int) -> Answers:
    arrived: asyncio.Queue[tuple[int, GenerationEvent | EdgeShardError]] = asyncio.Queue(
        _READ_AHEAD * at_once
    )
    places = asyncio.Semaphore(at_once)

    async def run(index: int) -> None:
        try:
            async with places, aclosing(opened[index]()) as events:
                async for event in events:
                    await arrived.put((index, event))
        except EdgeShardError as error:
            await arrived.put((index, error))

    tasks = [asyncio.create_task(run(index)) for index in range(len(opened))]
    try:
        left = len(opened)
        while left:
            index, event = await arrived.get()
            if isinstance(event, EdgeShardError):
                raise event
            left -= isinstance(event, Finished)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the client leaves before: then raises
    CancelledRequestError."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CancelledRequestError("the client disconnected", reason="CLIENT_LEFT")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
