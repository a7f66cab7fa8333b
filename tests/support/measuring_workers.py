"""The processes that measure layers, below this one."""

from __future__ import annotations

import asyncio
import contextlib

import psutil


def measuring_workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            if "edgeshard_agent.measuring.measuring_worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def measuring_worker() -> psutil.Process:
    """The one that runs, or the next."""
    async with asyncio.timeout(60):
        while not (found := measuring_workers()):  # noqa: ASYNC110 (a process has no event)
            await asyncio.sleep(0.01)
    return found[0]


async def until_stopped(worker: psutil.Process, stopped: bool = True) -> None:
    """A thread that waits for a core stops when it gets one, before it does anything."""
    async with asyncio.timeout(60):
        while (worker.status() == psutil.STATUS_STOPPED) is not stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
