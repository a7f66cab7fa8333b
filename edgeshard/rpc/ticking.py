"""The beat of a process's watches: all together, since a wake costs more than a watch's work in it."""

from __future__ import annotations

import asyncio

from edgeshard.rpc.link_watch import TICK_S


async def next_tick() -> None:
    """Sleep for about `TICK_S` at most, until the event loop's clock has a multiple of it."""
    delay_s = TICK_S - asyncio.get_running_loop().time() % TICK_S
    # A remainder may be next to nothing if the time is a multiple except for its last bit.
    await asyncio.sleep(delay_s if delay_s > TICK_S / 100 else delay_s + TICK_S)
