"""The watchdog of event loops sees a callback that computes, and no other."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.watchdog import watching


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


async def test_a_callback_that_computes_is_named() -> None:
    async def long_step() -> None:
        await asyncio.sleep(0)
        compute(0.03)

    with watching(limit_s=0.02) as watchdog:
        await asyncio.create_task(long_step())
        asyncio.get_running_loop().call_soon(compute, 0.03)
        await asyncio.sleep(0.01)
    names = [slow.name.rpartition(".")[2] for slow in watchdog.slow]
    assert names == ["long_step", "compute"]
    assert watchdog.longest_s > 0.02 and watchdog.callbacks > 3
    with pytest.raises(AssertionError, match="long_step took 0"):
        watchdog.check()


async def test_waiting_and_other_threads_do_not_count() -> None:
    async def wait() -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - a thread that waits
        await asyncio.to_thread(compute, 0.05)

    with watching(limit_s=0.02) as watchdog:
        await asyncio.create_task(wait())
    watchdog.check()


async def test_nothing_is_measured_afterwards() -> None:
    with watching(limit_s=0.02) as watchdog:
        pass
    await asyncio.create_task(asyncio.sleep(0))
    assert watchdog.callbacks == 0
