"""What each stage did in each step, put on one clock: bubbles seen instead of guessed. Pure.

Every box tells times on its own monotonic clock. Steps go around a ring, so no clock has to be trusted: the quickest
step over a hop bounds how far two clocks are apart, and around the whole ring the differences cancel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgeshard.model import LayerRange


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step on one stage, in seconds of the box's own clock.

    It arrived, computing began and ended, and its last byte was handed to the link at `sent_s`. `returned_s` is when
    the head had its result, on the first stage only, 0 while it had not. `prompt_tokens` of its `tokens` belong to prompts.
    """

    step: int
    tokens: int
    prompt_tokens: int
    arrived_s: float
    began_s: float
    ended_s: float
    sent_s: float
    returned_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTrace:
    """A stage's records in the order of their steps."""

    stage: int
    node: str
    layers: LayerRange
    records: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class StageShare:
    """Parts of the traced time, which sum to 1: computing, sending while nothing computes, and idle (the bubbles)."""

    computing: float
    sending: float
    idle: float


def aligned(traces: Sequence[StageTrace]) -> tuple[StageTrace, ...]:
    """The same records on one clock that begins with the first of them.

    Between two stages the least time from `sent_s` to `arrived_s` is the clocks' difference and the quickest transfer;
    over the ring the differences sum to 0, so the sum is that of the transfers, of which each hop is given its even
    share. Stages that share no step keep their clocks.
    """
    traces = sorted(traces, key=lambda trace: trace.stage)
    if not any(trace.records for trace in traces):
        return tuple(traces)
    gaps = [_least_gap(sender, receiver) for sender, receiver in pairwise(traces)]
    gaps.append(_least_return(traces[0], traces[-1]) if len(traces) > 1 else 0.0)
    known = [gap for gap in gaps if gap is not None]
    share = sum(known) / len(gaps) if len(known) == len(gaps) else 0.0
    offsets = [0.0]
    for gap in gaps[:-1]:
        offsets.append(offsets[-1] + ((gap - share) if gap is not None else 0.0))
    origin = min(
        record.arrived_s - offset for trace, offset in zip(traces, offsets, strict=True) for record in trace.records
    )
    return tuple(
        StageTrace(trace.stage, trace.node, trace.layers, tuple(_moved(r, offset + origin) for r in trace.records))
        for trace, offset in zip(traces, offsets, strict=True)
    )


def _least_gap(sender: StageTrace, receiver: StageTrace) -> float | None:
    sent = {record.step: record.sent_s for record in sender.records}
    return min((r.arrived_s - sent[r.step] for r in receiver.records if r.step in sent), default=None)


def _least_return(head: StageTrace, last: StageTrace) -> float | None:
    sent = {record.step: record.sent_s for record in last.records}
    return min((r.returned_s - sent[r.step] for r in head.records if r.returned_s and r.step in sent), default=None)


def _moved(record: StepRecord, by_s: float) -> StepRecord:
    return StepRecord(
        record.step,
        record.tokens,
        record.prompt_tokens,
        record.arrived_s - by_s,
        record.began_s - by_s,
        record.ended_s - by_s,
        record.sent_s - by_s,
        record.returned_s - by_s if record.returned_s else 0.0,
    )


def shares(trace: StageTrace, from_s: float, until_s: float) -> StageShare:
    """Where the stage's time went between two moments of the aligned clock."""
    span = max(until_s - from_s, 1e-12)
    computing = sum(_within(record.began_s, record.ended_s, from_s, until_s) for record in trace.records)
    sending, free_from = 0.0, from_s
    following = [record.began_s for record in trace.records[1:]] + [until_s]
    for record, next_begins in zip(trace.records, following, strict=True):
        sending += _within(max(record.ended_s, free_from), min(record.sent_s, next_begins), from_s, until_s)
        free_from = max(free_from, record.sent_s)
    return StageShare(computing / span, sending / span, max(0.0, 1.0 - (computing + sending) / span))


def span(traces: Sequence[StageTrace]) -> tuple[float, float]:
    """From the first computing to the last; (0, 0) without records."""
    records = [record for trace in traces for record in trace.records]
    if not records:
        return 0.0, 0.0
    return min(r.began_s for r in records), max(r.ended_s for r in records)


def _within(begin_s: float, end_s: float, from_s: float, until_s: float) -> float:
    return max(0.0, min(end_s, until_s) - max(begin_s, from_s))


def perfetto(traces: Sequence[StageTrace], deployment: str) -> str:
    """Aligned traces in the Trace Event Format (JSON), which ui.perfetto.dev and chrome://tracing open.

    A process for each stage with three rows: computing, waiting in the inbox, sending.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append(
            _named(
                "process_name", trace.stage, 0, f"{deployment} stage {trace.stage}: {trace.node}, layers {trace.layers}"
            )
        )
        for row, name in enumerate(("compute", "wait", "send")):
            events.append(_named("thread_name", trace.stage, row, name))
        for record in trace.records:
            kind = "prefill" if record.prompt_tokens else "decode"
            label = f"{kind} {record.tokens}" if record.tokens else "bookkeeping"
            arguments = {"step": record.step, "tokens": record.tokens, "prompt_tokens": record.prompt_tokens}
            for row, begin_s, end_s in (
                (0, record.began_s, record.ended_s),
                (1, record.arrived_s, record.began_s),
                (2, record.ended_s, record.sent_s),
            ):
                events.append(
                    {
                        "name": label,
                        "cat": kind,
                        "ph": "X",
                        "pid": trace.stage,
                        "tid": row,
                        "ts": round(begin_s * 1e6, 3),
                        "dur": round(max(0.0, end_s - begin_s) * 1e6, 3),
                        "args": arguments,
                    }
                )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
