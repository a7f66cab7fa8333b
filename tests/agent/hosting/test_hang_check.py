"""A compute thread that hangs: the stages of the node fail, and other commands are refused instead
of left open."""

from __future__ import annotations

import asyncio
import threading

import pytest
from edgeshard_agent.core.hanging import CHECK_S, PROGRESS_S, STILL_S, RunningStep
from edgeshard_agent.engine.compute_thread import ComputeThread, HangCheck

from edgeshard.domain.errors import EdgeShardError, UnavailableError

pytestmark = pytest.mark.timing

PATIENCE_S = 60


class Stage:
    """Computes one step for ever, or nothing."""

    def __init__(self, step: RunningStep | None = None) -> None:
        self.step = step
        self.failures: list[EdgeShardError] = []

    def running(self) -> RunningStep | None:
        return self.step

    def fail(self, error: EdgeShardError) -> None:
        self.failures.append(error)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


async def test_when_a_step_hangs_every_stage_of_the_node_fails_once() -> None:
    """They share the thread: nothing of any of them is computed any more."""
    stages = [Stage(RunningStep(3, 1e6, 0.0)), Stage()]
    worker = ComputeThread(1)
    clock = Clock()
    busy = threading.Event()
    worker.submit(busy.wait, PATIENCE_S)
    check = HangCheck(lambda: stages, worker, clock)
    check.look()
    for _ in range(round(STILL_S / CHECK_S) - 1):
        clock.time += CHECK_S
        check.look()
    assert not any(stage.failures for stage in stages)
    for _ in range(5):
        clock.time += CHECK_S
        check.look()
    assert [[error.reason for error in stage.failures] for stage in stages] == [
        ["STAGE_HUNG"],
        ["STAGE_HUNG"],
    ]
    busy.set()
    worker.close()


async def test_a_call_that_is_no_step_hangs_as_one_does_and_one_that_computes_does_not() -> None:
    """Such as the loading of a stage. `found_well`, which a watchdog follows, grows only while the
    thread gets on."""
    stage = Stage()
    clock = Clock()
    busy = threading.Event()
    stuck = threading.Event()
    worker = ComputeThread(1, clock)
    check = HangCheck(lambda: [stage], worker, clock)
    check.look()
    assert check.found_well == 1, "an idle thread is well"

    def compute() -> None:
        while not busy.is_set():
            pass

    try:
        computing = asyncio.create_task(worker.run(compute))
        async with asyncio.timeout(PATIENCE_S):
            used_s = 0.0
            for _ in range(round(2 * STILL_S / CHECK_S)):
                while (call := worker.running()) is None or call.cpu_s < used_s + 2 * PROGRESS_S:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                used_s = call.cpu_s
                clock.time += CHECK_S
                check.look()
            assert check.found_well == 1 + round(2 * STILL_S / CHECK_S) and not stage.failures
            busy.set()
            await computing
            waiting = asyncio.create_task(worker.run(stuck.wait))
            while worker.running() is None:  # noqa: ASYNC110 (another thread begins it)
                await asyncio.sleep(0.001)
        well = check.found_well
        for _ in range(round(2 * STILL_S / CHECK_S)):
            clock.time += CHECK_S
            check.look()
        assert [error.reason for error in stage.failures] == ["STAGE_HUNG"]
        assert check.found_well - well <= round(STILL_S / CHECK_S) + 1
    finally:
        busy.set()
        stuck.set()
    await waiting
    worker.close()


async def test_a_thread_that_hangs_refuses_work_until_its_call_returns() -> None:
    worker, busy = ComputeThread(1), threading.Event()
    worker.submit(busy.wait, PATIENCE_S)
    worker.give_up()
    with pytest.raises(UnavailableError) as refused:
        await worker.run(lambda: None)
    assert refused.value.reason == "STAGE_HUNG" and "restart" in refused.value.message
    busy.set()
    async with asyncio.timeout(PATIENCE_S):
        while worker.hangs:  # noqa: ASYNC110 (another thread tells)
            await asyncio.sleep(0.001)
    assert await worker.run(lambda: 7) == 7
    worker.close()
