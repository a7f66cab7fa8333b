"""The beat of a process's watches, over a clock that moves only by sleeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edgeshard.rpc.link_watch import TICK_S, next_tick


@pytest.mark.parametrize("began", [0.0, 0.3, 12345.678, 0.1 * 7, 99.99999999])
async def test_ticks_are_at_the_same_multiples_whenever_one_begins_to_wait(
    began: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, loop = began, asyncio.get_running_loop()

    async def sleep(delay: float, *_: Any) -> None:
        nonlocal now
        now += delay

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(loop, "time", lambda: now)
    for _ in range(100):
        before = now
        await next_tick()
        assert TICK_S / 100 < now - before < 1.02 * TICK_S
        assert abs(now / TICK_S - round(now / TICK_S)) < 1e-6
    monkeypatch.undo()
