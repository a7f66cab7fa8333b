"""Traces of nodes whose clocks disagree, put on one clock."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.trace import (
    ReadRecord,
    StageTrace,
    StepRecord,
    aligned,
    check_seconds,
    most_in_flight,
    perfetto,
    shares,
    span,
    summarised,
    summarised_reads,
)

COMPUTE_S = 0.010
SEND_S = 0.002
DELAY_S = 0.003


def ring(stages: int, steps: int, clocks: list[float]) -> tuple[StageTrace, ...]:
    """A sequential ring: one step at a time, each clock ahead by its own amount."""
    records: list[list[StepRecord]] = [[] for _ in range(stages)]
    now = 0.0
    for step in range(steps):
        arrivals = []
        for _ in range(stages):
            arrivals.append(now)
            now += COMPUTE_S + SEND_S + DELAY_S
        for stage, arrived in enumerate(arrivals):
            began, ended = arrived + clocks[stage], arrived + clocks[stage] + COMPUTE_S
            returned = now + clocks[0] if stage == 0 else 0.0
            prompt = 5 if step == 0 else 0
            records[stage].append(
                StepRecord(step, prompt or 1, prompt, began, began, ended, ended + SEND_S, returned)
            )
    return tuple(
        StageTrace(stage, f"node-{stage}", LayerRange(stage, stage + 1), tuple(records[stage]))
        for stage in range(stages)
    )


@pytest.mark.parametrize("clocks", [[0.0, 0.0, 0.0], [1000.0, 3.5, -80.0], [-5.0, 7e5, 1.0]])
def test_clocks_that_disagree_are_put_right(clocks: list[float]) -> None:
    truth = ring(3, 4, [0.0] * 3)
    found = aligned(ring(3, 4, clocks))
    for trace, true in zip(found, truth, strict=True):
        for record, expected in zip(trace.records, true.records, strict=True):
            assert record.began_s == pytest.approx(expected.began_s, abs=1e-6)
            assert record.returned_s == pytest.approx(expected.returned_s, abs=1e-6)


def test_reads_are_put_on_the_clock_of_the_steps() -> None:
    head, last = ring(2, 4, [1000.0, 3.5])
    lag_s = COMPUTE_S + SEND_S + DELAY_S
    reads = tuple(
        ReadRecord(1, 100, 3.5 + lag_s + at, 3.5 + lag_s + at + 0.01) for at in (-0.02, 0.0)
    )
    found = aligned((head, replace(last, reads=reads)))
    first, second = found[1].reads
    assert first.began_s == pytest.approx(lag_s - 0.02, abs=1e-6), (
        "it may begin before the first step"
    )
    assert second.began_s == pytest.approx(found[1].records[0].began_s, abs=1e-6)
    (summary,) = summarised_reads(found)
    assert (summary.stage, summary.reads, summary.size_bytes) == (1, 2, 200)
    assert summary.bytes_per_s == pytest.approx(1e4) and summary.read_s == pytest.approx(0.01)
    begin, end = span(found)
    within = 0.01 + max(0.0, min(first.ended_s, end) - max(first.began_s, begin))
    assert summary.reading == pytest.approx(within / (end - begin))


def test_stages_in_any_order_come_out_in_theirs() -> None:
    traces = ring(3, 2, [5.0, 6.0, 7.0])
    assert aligned(traces[::-1]) == aligned(traces)


def test_a_step_that_never_came_back_does_no_harm() -> None:
    head, last = ring(2, 3, [100.0, 0.0])
    lost = replace(head, records=(*head.records[:2], replace(head.records[2], returned_s=0.0)))
    cut = replace(last, records=last.records[:2])
    found = aligned((lost, cut))
    assert found[1].records[0].arrived_s > found[0].records[0].sent_s
    assert found[0].records[2].returned_s == 0.0


def test_a_sequential_ring_of_two_idles_half_the_time() -> None:
    traces = aligned(ring(2, 10, [0.0, 50.0]))
    begin, end = span(traces)
    found = shares(traces[0], begin, end)
    assert found.computing + found.sending + found.idle == pytest.approx(1.0)
    lap = 2 * (COMPUTE_S + SEND_S + DELAY_S)
    assert found.computing == pytest.approx(
        10 * COMPUTE_S / (10 * lap - SEND_S - DELAY_S), rel=1e-6
    )
    assert found.idle > 0.5


def test_sending_under_the_next_step_is_no_bubble() -> None:
    records = tuple(
        StepRecord(
            n, 1, 0, n * COMPUTE_S, n * COMPUTE_S, (n + 1) * COMPUTE_S, (n + 1) * COMPUTE_S + SEND_S
        )
        for n in range(5)
    )
    trace = StageTrace(0, "a", LayerRange(0, 1), records)
    found = shares(trace, 0.0, 5 * COMPUTE_S)
    assert (
        found.computing == pytest.approx(1.0)
        and found.sending == pytest.approx(0.0)
        and found.idle < 1e-9
    )


def test_perfetto_gets_complete_events_of_every_stage() -> None:
    traces = aligned(ring(2, 3, [0.0, 9.0]))
    events = json.loads(perfetto(traces, "tales"))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 3
    assert {event["pid"] for event in complete} == {0, 1}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    assert complete[0]["name"] == "prefill 5" and complete[1]["name"] == "decode 1"
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["tales stage 0: node-0, layers 0:1", "tales stage 1: node-1, layers 1:2"]


def test_perfetto_gets_waiting_and_sending_as_pairs_that_may_overlap() -> None:
    slow = tuple(StepRecord(n, 1, 0, 0.0, 1.0 + n, 2.0 + n, 4.0 + n) for n in range(3))
    stages = (
        StageTrace(0, "a", LayerRange(0, 1), slow),
        StageTrace(1, "b", LayerRange(1, 2), slow),
    )
    events = json.loads(perfetto(stages, "tales"))["traceEvents"]
    begins = {(e["name"], e["id"]): e["ts"] for e in events if e["ph"] == "b"}
    ends = {(e["name"], e["id"]): e["ts"] for e in events if e["ph"] == "e"}
    assert begins.keys() == ends.keys() and len(begins) == 2 * 2 * 3
    assert (begins["wait", "1.2"], ends["wait", "1.2"]) == (0.0, 3e6)
    assert (begins["send", "0.1"], ends["send", "0.1"]) == (3e6, 5e6)


def test_a_summary_is_over_the_time_of_all_stages() -> None:
    traces = aligned(ring(2, 10, [0.0, 50.0]))
    begin, end = span(traces)
    first, second = summarised(traces)
    assert (first.node, first.steps, second.stage) == ("node-0", 10, 1)
    assert first.tokens_per_s == second.tokens_per_s == pytest.approx((5 + 9) / (end - begin))
    assert first.share == shares(traces[0], begin, end) and first.compute_s == pytest.approx(
        COMPUTE_S
    )
    assert first.wait_s == 0.0
    silent = summarised((traces[0], replace(traces[1], records=())))[1]
    assert (silent.steps, silent.share.idle) == (0, 1.0), (
        "its answer may hold none where steps are long"
    )


def test_steps_in_flight_are_counted_at_the_head() -> None:
    assert most_in_flight(ring(2, 5, [0.0, 9.0])) == 1
    three = tuple(
        StepRecord(n, 1, 0, float(n), n + 0.1, n + 0.2, n + 0.3, n + 2.5) for n in range(9)
    )
    assert most_in_flight((StageTrace(0, "a", LayerRange(0, 1), three),)) == 3


@pytest.mark.parametrize("seconds", [0.0, 0.09, 60.5, -1.0, math.nan, math.inf])
def test_a_trace_is_neither_short_nor_endless(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_seconds(seconds)
    assert refused.value.field == "seconds"


def test_nothing_traced_is_nothing() -> None:
    empty = (StageTrace(0, "a", LayerRange(0, 1), ()),)
    assert aligned(empty) == empty and span(empty) == (0.0, 0.0) and most_in_flight(empty) == 0
