"""Calls to measure nodes, by themselves: their listeners, and the stored results."""

from __future__ import annotations

import asyncio

import pytest
from edgeshard_coordinator.control.runtime.measure_calls import (
    MOST_CALLS,
    MeasureCall,
    MeasureCalls,
)
from edgeshard_coordinator.core.values.jobs import Measured

from edgeshard.domain.control.commands import CommandProgress
from edgeshard.domain.control.site import NodeProgress
from edgeshard.domain.errors import ResourceExhaustedError, UnavailableError
from edgeshard.domain.ids import NodeId, NodeName, OperationId

pytestmark = pytest.mark.timing

A, B = NodeId("id-a"), NodeId("id-b")


def begin(calls: MeasureCalls, number: int = 0) -> MeasureCall:
    return calls.begin(
        OperationId(f"op-{number}"), f"uid{number}", "print", {A: NodeName("a"), B: NodeName("b")}
    )


def progress(calls: MeasureCalls, node_id: NodeId, done: int, number: int = 0) -> None:
    calls.progress(
        node_id,
        CommandProgress(OperationId(f"uid{number}/0/measure/0"), done, 100, f"point {done}"),
    )


async def test_a_slow_listener_gets_the_newest_of_every_node() -> None:
    calls = MeasureCalls()
    call = begin(calls)
    stream = calls.follow(call)
    assert await anext(stream) == NodeProgress(NodeName("a"))
    for done in range(1000):
        progress(calls, A, done)
    calls.finished(Measured("uid0", B))
    calls.finished(Measured("uid0", A, UnavailableError("gone")))
    rest = [message async for message in stream]
    assert len(rest) == 2 and all(message.finished for message in rest)
    failed = next(message for message in rest if message.node == "a")
    assert (failed.done, failed.what) == (999, "point 999") and isinstance(
        failed.failure, UnavailableError
    )
    assert not call.listeners


async def test_what_comes_after_the_end_or_of_strangers_changes_nothing() -> None:
    calls = MeasureCalls()
    call = begin(calls)
    calls.finished(Measured("uid0", A))
    before = dict(call.nodes)
    progress(calls, A, 5)
    progress(calls, NodeId("id-z"), 5)
    progress(calls, A, 5, number=7)
    calls.finished(Measured("uid7", A))
    assert call.nodes == before


async def test_a_listener_that_leaves_is_forgotten() -> None:
    calls = MeasureCalls()
    call = begin(calls)
    stream = calls.follow(call)
    await anext(stream)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert len(call.listeners) == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not call.listeners


async def test_too_many_calls_are_refused_and_finished_ones_give_way() -> None:
    calls = MeasureCalls()
    for number in range(MOST_CALLS):
        begin(calls, number)
    with pytest.raises(ResourceExhaustedError):
        begin(calls, MOST_CALLS)
    for node_id in (A, B):
        calls.finished(Measured("uid3", node_id))
    begin(calls, MOST_CALLS)
    assert calls.find(OperationId("op-3")) is None and calls.find(OperationId("op-4")) is not None


async def test_the_end_of_the_coordinator_ends_every_stream() -> None:
    calls = MeasureCalls()
    stream = calls.follow(begin(calls))
    await anext(stream)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    calls.close(UnavailableError("shutting down"))
    with pytest.raises(UnavailableError):
        await waiting
