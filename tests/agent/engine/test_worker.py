"""The compute thread: calls in order, what becomes of them, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from edgeshard_agent.engine.compute_thread import ComputeThread

PATIENCE_S = 60


async def test_calls_run_in_order_on_one_thread_and_give_their_results_and_errors() -> None:
    worker, seen = ComputeThread(1), list[int]()
    for number in range(3):
        worker.submit(seen.append, number)
    threads = {await worker.run(threading.get_ident) for _ in range(2)}
    assert seen == [0, 1, 2] and len(threads) == 1 and threads != {threading.get_ident()}
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    worker.submit(lambda: 1 / 0)
    assert await worker.run(lambda: "goes on") == "goes on", "an error of nobody's ends no thread"
    worker.close()


async def test_a_wait_that_is_cancelled_takes_a_call_back_that_has_not_begun() -> None:
    worker = ComputeThread(1)
    let = threading.Event()
    ran = list[str]()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert let.wait(PATIENCE_S)
        ran.append("first")

    waits = [
        asyncio.create_task(worker.run(first)),
        asyncio.create_task(worker.run(ran.append, "second")),
    ]
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for wait in waits:
        wait.cancel()
    assert [type(ended) for ended in await asyncio.gather(*waits, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    let.set()
    await worker.run(lambda: None)
    assert ran == ["first"]
    worker.close()


async def test_after_its_end_nobody_waits_for_the_thread_and_it_takes_nothing() -> None:
    worker = ComputeThread(1)
    let = threading.Event()
    begun = threading.Event()

    def busy() -> None:
        begun.set()
        assert let.wait(PATIENCE_S)

    worker.submit(busy)
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    waiting = asyncio.create_task(worker.run(lambda: None))
    await asyncio.sleep(0)
    worker.close()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        worker.submit(print)
    let.set()
    assert worker._thread is not None
    await asyncio.to_thread(worker._thread.join, PATIENCE_S)
    assert not worker._thread.is_alive()


async def test_nothing_of_a_call_stays_in_memory_until_the_next() -> None:
    class Weights:
        pass

    worker, weights = ComputeThread(1), Weights()
    kept = weakref.ref(weights)
    worker.submit(lambda weights: None, weights)
    del weights
    async with asyncio.timeout(PATIENCE_S):
        while kept() is not None:
            gc.collect()
            await asyncio.sleep(0.01)
    worker.close()
