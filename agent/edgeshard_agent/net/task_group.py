"""Coroutines that end together, such as the two directions of a stream, and tasks that are left to end alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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


def heed(task: asyncio.Task[Any]) -> None:
    """A callback for a task that nobody may be waiting for when it ends: its error is no news then."""
    if not task.cancelled():
        task.exception()
