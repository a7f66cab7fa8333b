"""Work outside the loop: its answer returns, and the end of the process does not wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from edgeshard_coordinator.control.runtime.solver import SOLVES_AT_ONCE, Solver

from edgeshard.domain.errors import PlacementError

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0


async def test_results_and_errors_come_back() -> None:
    def refuse() -> None:
        raise PlacementError("no")

    solver = Solver()
    assert await solver.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(PlacementError):
        await solver.run(refuse)


async def test_only_so_many_work_at_once() -> None:
    solver = Solver()
    begun = threading.Semaphore(0)
    released = threading.Event()

    def work() -> bool:
        begun.release()
        return released.wait(DEADLINE_S)

    tasks = [asyncio.create_task(solver.run(work)) for _ in range(SOLVES_AT_ONCE + 1)]
    for _ in range(SOLVES_AT_ONCE):
        assert await asyncio.to_thread(begun.acquire, timeout=DEADLINE_S)
    assert not begun.acquire(blocking=False)
    released.set()
    assert all(await asyncio.gather(*tasks))


async def test_work_that_nobody_waits_for_keeps_its_place() -> None:
    before = set(threading.enumerate())
    solver = Solver()
    begun = threading.Semaphore(0)
    released = threading.Event()

    def work() -> bool:
        begun.release()
        return released.wait(DEADLINE_S)

    gone = [asyncio.create_task(solver.run(work)) for _ in range(SOLVES_AT_ONCE)]
    for _ in gone:
        assert await asyncio.to_thread(begun.acquire, timeout=DEADLINE_S)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    late = asyncio.create_task(solver.run(work))
    await asyncio.sleep(0)  # Now it would have begun.
    assert (
        sum(thread.name == "solver" for thread in set(threading.enumerate()) - before)
        == SOLVES_AT_ONCE
    )
    released.set()
    assert await late


def test_an_end_does_not_wait_for_a_solve() -> None:
    begun = threading.Event()
    released = threading.Event()
    over = threading.Event()

    def work() -> None:
        begun.set()
        released.wait(DEADLINE_S)
        over.set()

    async def main() -> None:
        task = asyncio.create_task(Solver().run(work))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        task.cancel()

    asyncio.run(main())
    assert not over.is_set()
    released.set()
    assert over.wait(DEADLINE_S)
