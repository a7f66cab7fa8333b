"""The work of each stage in each step, put on one clock, so that bubbles are measured. Pure.

Every node reads times from its own monotonic clock. Steps go around a ring, so no clock has to be
trusted. The quickest step over a hop bounds the difference of two clocks, and around the whole ring
the differences cancel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Annotated, Any

from edgeshard.domain.checks import at_most
from edgeshard.domain.errors import InvalidArgumentError, invalid
from edgeshard.domain.ids import Text
from edgeshard.domain.models.model import LayerRange

_COMPUTE, _READS = 0, 1
"""Rows of a stage."""
LEAST_SECONDS, MOST_SECONDS = 0.1, 60.0
"""How long a trace may take."""
MOST_RECORDS = 20_000
"""Records of a stage, and as many reads; of more the newest are kept."""


def check_seconds(seconds: float, field: str = "seconds") -> float:
    """Return how long to trace; raises InvalidArgumentError naming the field if it is out of
    range."""
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:  # also for nan
        why = f"must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, not {seconds:g}"
        raise invalid(field, why, "TRACE_LENGTH")
    return seconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step on one stage, in seconds of the node's own clock.

    It arrived, computing began and ended, and at `sent_s` its last frame was handed to the link,
    which may take longer. `returned_s` is the time when the head had its result, on the first stage
    only, 0 until then. `prompt_tokens` of its `tokens` are prompts', `guesses` are draft tokens and
    `right_guesses` were accepted: the first stage knows once its head has the result. `came_s` is
    the time when its last frame was there and not yet decoded, on the first stage its result's; 0
    if none arrived.
    """

    step: int
    tokens: int
    prompt_tokens: int
    arrived_s: float
    began_s: float
    ended_s: float
    sent_s: float
    returned_s: float = 0.0
    guesses: int = 0
    right_guesses: int = 0
    came_s: float = 0.0

    def check(self) -> None:
        times = (self.arrived_s, self.began_s, self.ended_s, self.sent_s)
        # In this order, which nan and infinity never are.
        if not (all(a <= b for a, b in pairwise(times)) and math.isfinite(times[-1] - times[0])):
            raise InvalidArgumentError(
                f"step {self.step} has times that are no times or out of order"
            )
        if not (math.isfinite(self.returned_s) and math.isfinite(self.came_s)):
            raise InvalidArgumentError(f"step {self.step} came or returned at no time")


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """`size_bytes` of a layer's weights that were read from the disk, in seconds of the node's own
    clock.

    If `expert` is None, they are reads of all that streams of the layer, else of one expert.
    """

    layer: int
    size_bytes: int
    began_s: float
    ended_s: float
    expert: int | None = None

    def check(self) -> None:
        if not (self.began_s <= self.ended_s and math.isfinite(self.ended_s - self.began_s)):
            raise InvalidArgumentError(
                f"layer {self.layer} has times that are no times or out of order"
            )

    @property
    def unit(self) -> str:
        """The unit that was read, in words."""
        return (
            f"layer {self.layer}"
            if self.expert is None
            else f"layer {self.layer} expert {self.expert}"
        )


@dataclass(frozen=True, slots=True)
class StageTrace:
    """A stage's records in the order of their steps, and its reads meanwhile if weights are on its
    disk."""

    stage: int
    node: Text
    layers: LayerRange
    records: Annotated[tuple[StepRecord, ...], at_most(MOST_RECORDS)]
    reads: Annotated[tuple[ReadRecord, ...], at_most(MOST_RECORDS)] = ()


@dataclass(frozen=True, slots=True)
class StageShare:
    """Parts of the traced time, which sum to 1: computing, sending while nothing computes, and idle
    (the bubbles)."""

    computing: float
    sending: float
    idle: float


def aligned(traces: Sequence[StageTrace]) -> tuple[StageTrace, ...]:
    """The same records on one clock that begins with the first step's; a read may have begun
    before.

    Between two stages the least time from `sent_s` to `arrived_s` is the clocks' difference plus
    the quickest transfer. Over the ring the differences sum to 0, so the sum is the transfers'.
    Each hop is assigned an even share of it. Stages that share no step keep their clocks.
    (docs/papers/agent.md#clocks-of-a-trace)
    """
    traces = sorted(traces, key=lambda trace: trace.stage)
    if not any(trace.records for trace in traces):
        return tuple(traces)
    gaps = [_least_gap(sender, receiver) for sender, receiver in pairwise(traces)]
    gaps.append(_least_return(traces[0], traces[-1]) if len(traces) > 1 else 0.0)
    known_gaps = [gap for gap in gaps if gap is not None]
    share = sum(known_gaps) / len(gaps) if len(known_gaps) == len(gaps) else 0.0
    offsets = [0.0]
    for gap in gaps[:-1]:
        offsets.append(offsets[-1] + ((gap - share) if gap is not None else 0.0))
    origin = min(
        record.arrived_s - offset
        for trace, offset in zip(traces, offsets, strict=True)
        for record in trace.records
    )
    return tuple(
        replace(
            trace,
            records=tuple(_moved(record, offset + origin) for record in trace.records),
            reads=tuple(_moved_read(read, offset + origin) for read in trace.reads),
        )
        for trace, offset in zip(traces, offsets, strict=True)
    )


def _least_gap(sender: StageTrace, receiver: StageTrace) -> float | None:
    send_times = {record.step: record.sent_s for record in sender.records}
    return min(
        (r.arrived_s - send_times[r.step] for r in receiver.records if r.step in send_times),
        default=None,
    )


def _least_return(head: StageTrace, last: StageTrace) -> float | None:
    send_times = {record.step: record.sent_s for record in last.records}
    return min(
        (
            r.returned_s - send_times[r.step]
            for r in head.records
            if r.returned_s and r.step in send_times
        ),
        default=None,
    )


def _moved(record: StepRecord, by_s: float) -> StepRecord:
    return replace(
        record,
        arrived_s=record.arrived_s - by_s,
        began_s=record.began_s - by_s,
        ended_s=record.ended_s - by_s,
        sent_s=record.sent_s - by_s,
        returned_s=record.returned_s - by_s if record.returned_s else 0.0,
        came_s=record.came_s - by_s if record.came_s else 0.0,
    )


def _moved_read(read: ReadRecord, by_s: float) -> ReadRecord:
    return replace(read, began_s=read.began_s - by_s, ended_s=read.ended_s - by_s)


def shares(trace: StageTrace, from_s: float, until_s: float) -> StageShare:
    """The parts of the stage's time between two moments of the aligned clock."""
    span = max(until_s - from_s, 1e-12)
    computing = sum(
        _within(record.began_s, record.ended_s, from_s, until_s) for record in trace.records
    )
    sending, free_from = 0.0, from_s
    following = [record.began_s for record in trace.records[1:]] + [until_s]
    # without records, nothing follows
    for record, next_begins in zip(trace.records, following, strict=False):
        sending += _within(
            max(record.ended_s, free_from), min(record.sent_s, next_begins), from_s, until_s
        )
        free_from = max(free_from, record.sent_s)
    return StageShare(
        computing / span, sending / span, max(0.0, 1.0 - (computing + sending) / span)
    )


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A stage over the whole traced time; medians in seconds, over the steps that had tokens."""

    stage: int
    node: str
    layers: LayerRange
    steps: int
    tokens_per_s: float
    share: StageShare
    compute_s: float
    wait_s: float


def summarised(traces: Sequence[StageTrace]) -> tuple[StageSummary, ...]:
    """A summary of each aligned trace, all over the same time."""
    from_s, until_s = span(traces)
    return tuple(_summary(trace, from_s, until_s) for trace in traces)


def _summary(trace: StageTrace, from_s: float, until_s: float) -> StageSummary:
    working = [record for record in trace.records if record.tokens]
    return StageSummary(
        trace.stage,
        trace.node,
        trace.layers,
        len(trace.records),
        sum(record.tokens for record in working) / max(until_s - from_s, 1e-12),
        shares(trace, from_s, until_s),
        median(record.ended_s - record.began_s for record in working) if working else 0.0,
        median(record.began_s - record.arrived_s for record in working) if working else 0.0,
    )


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """The reads of a stage with weights on its disk over the whole traced time.

    `reading` is the part of that time in which it read, and `bytes_per_s` the rate while it did.
    `read_s` is the median time of a read, which is a layer's or an expert's, in seconds.
    """

    stage: int
    node: str
    layers: LayerRange
    reads: int
    size_bytes: int
    bytes_per_s: float
    reading: float
    read_s: float


def summarised_reads(traces: Sequence[StageTrace]) -> tuple[ReadSummary, ...]:
    """A summary of the reads of each aligned trace that has any."""
    from_s, until_s = span(traces)
    return tuple(_read_summary(trace, from_s, until_s) for trace in traces if trace.reads)


def _read_summary(trace: StageTrace, from_s: float, until_s: float) -> ReadSummary:
    seconds = [read.ended_s - read.began_s for read in trace.reads]
    size = sum(read.size_bytes for read in trace.reads)
    # one at a time
    within = sum(_within(read.began_s, read.ended_s, from_s, until_s) for read in trace.reads)
    return ReadSummary(
        trace.stage,
        trace.node,
        trace.layers,
        len(trace.reads),
        size,
        size / max(sum(seconds), 1e-12),
        within / max(until_s - from_s, 1e-12),
        median(seconds),
    )


@dataclass(frozen=True, slots=True)
class GuessSummary:
    """The steps with draft tokens whose result the head had: their number, and their drafted and
    accepted tokens. Each rejected one was a row that every stage computed without use."""

    node: str
    steps: int
    guessed: int
    right: int


def summarised_guesses(traces: Sequence[StageTrace]) -> tuple[GuessSummary, ...]:
    """A summary of the head's draft tokens; empty if it drafted none."""
    for trace in traces:
        records = [record for record in trace.records if record.guesses and record.returned_s]
        if trace.stage == 0 and records:
            guessed, right = sum(r.guesses for r in records), sum(r.right_guesses for r in records)
            return (GuessSummary(trace.node, len(records), guessed, right),)
    return ()


def span(traces: Sequence[StageTrace]) -> tuple[float, float]:
    """From the first computing to the last; (0, 0) without records."""
    records = [record for trace in traces for record in trace.records]
    if not records:
        return 0.0, 0.0
    return min(r.began_s for r in records), max(r.ended_s for r in records)


def most_in_flight(traces: Sequence[StageTrace]) -> int:
    """How many steps were between their arrival at the first stage and their return to it at once,
    at most."""
    returned = [
        record
        for trace in traces
        if trace.stage == 0
        for record in trace.records
        if record.returned_s
    ]
    changes = sorted([(r.returned_s, -1) for r in returned] + [(r.arrived_s, 1) for r in returned])
    return max(accumulate(change for _, change in changes), default=0)


def _within(begin_s: float, end_s: float, from_s: float, until_s: float) -> float:
    return max(0.0, min(end_s, until_s) - max(begin_s, from_s))


def perfetto(traces: Sequence[StageTrace], deployment: str) -> str:
    """Aligned traces in the Trace Event Format (JSON), which ui.perfetto.dev and chrome://tracing
    open.

    Each stage is a process. Computing is a row of complete events, and reads of streamed weights
    are another. Steps that wait in the inbox or are being sent may overlap, so those are
    asynchronous events, one pair for each.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        words = f"{deployment} stage {trace.stage}: {trace.node}, layers {trace.layers}"
        events += [
            _named("process_name", trace.stage, words),
            _named("thread_name", trace.stage, "compute"),
        ]
        for record in trace.records:
            events += _step_events(trace.stage, record)
        if trace.reads:
            events.append(_named("thread_name", trace.stage, "reads", _READS))
        events += [_read_event(trace.stage, read) for read in trace.reads]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _step_events(stage: int, record: StepRecord) -> list[dict[str, Any]]:
    kind = "prefill" if record.prompt_tokens else "decode"
    args = {"step": record.step, "tokens": record.tokens, "prompt_tokens": record.prompt_tokens}
    if record.guesses:
        args |= {"guesses": record.guesses}
        args |= {"right_guesses": record.right_guesses} if record.returned_s else {}
    common = {"pid": stage, "tid": _COMPUTE, "args": args}
    computing = {
        "name": f"{kind} {record.tokens}" if record.tokens else "bookkeeping",
        "cat": kind,
        "ph": "X",
        "ts": _microseconds(record.began_s),
        "dur": _microseconds(max(0.0, record.ended_s - record.began_s)),
    }
    events = [computing | common]
    for name, begin_s, end_s in (
        ("wait", record.arrived_s, record.began_s),
        ("send", record.ended_s, record.sent_s),
    ):
        # The stage is part of the id: ids of one category are shared by all processes.
        pair = {"name": name, "cat": name, "id": f"{stage}.{record.step}"} | common
        events.append({"ph": "b", "ts": _microseconds(begin_s)} | pair)
        events.append({"ph": "e", "ts": _microseconds(max(begin_s, end_s))} | pair)
    return events


def _read_event(stage: int, read: ReadRecord) -> dict[str, Any]:
    return {
        "name": f"read {read.unit}",
        "cat": "read",
        "ph": "X",
        "ts": _microseconds(read.began_s),
        "dur": _microseconds(max(0.0, read.ended_s - read.began_s)),
        "pid": stage,
        "tid": _READS,
        "args": {"layer": read.layer, "size_bytes": read.size_bytes}
        | ({} if read.expert is None else {"expert": read.expert}),
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _named(what: str, process: int, name: str, thread: int = _COMPUTE) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
