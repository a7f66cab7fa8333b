"""The beat to which a process's watches look: all together, since a wake costs more than what a watch does in it."""

from __future__ import annotations

import asyncio

from edgeshard.rpc.link_watch import TICK_S


async def next_tick() -> None:
    """Sleep for at most `TICK_S`, until the event loop's clock has a multiple of it."""
    await asyncio.sleep(TICK_S - asyncio.get_running_loop().time() % TICK_S)
