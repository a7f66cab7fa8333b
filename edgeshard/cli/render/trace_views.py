"""Traces as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgeshard.cli.render.output import Column, human_bytes, human_seconds
from edgeshard.cli.render.svg import timeline
from edgeshard.cli.render.views import percent
from edgeshard.domain.requests.trace import (
    GuessSummary,
    ReadSummary,
    StageSummary,
    StageTrace,
    most_in_flight,
)
from edgeshard.planning.simulation.timing import Visit

PICTURED_STEPS = 24
"""Most steps that a drawing can show distinctly."""

SUMMARY_COLUMNS: list[Column[StageSummary]] = [
    Column("NODE", lambda stage: stage.node),
    Column("LAYERS", lambda stage: str(stage.layers)),
    Column("STEPS", lambda stage: str(stage.steps), right=True),
    Column("TOKENS/S", lambda stage: f"{stage.tokens_per_s:.1f}", right=True),
    Column("COMPUTING", lambda stage: percent(stage.share.computing), right=True),
    Column("SENDING", lambda stage: percent(stage.share.sending), right=True),
    Column("IDLE", lambda stage: percent(stage.share.idle), right=True),
    Column("STEP COMPUTES", lambda stage: human_seconds(stage.compute_s), right=True),
    Column("STEP WAITS", lambda stage: human_seconds(stage.wait_s), right=True),
]


READ_COLUMNS: list[Column[ReadSummary]] = [
    Column("NODE", lambda stage: stage.node),
    Column("LAYERS", lambda stage: str(stage.layers)),
    Column("READS", lambda stage: str(stage.reads), right=True),
    Column("READ", lambda stage: human_bytes(stage.size_bytes), right=True),
    Column("RATE", lambda stage: f"{human_bytes(round(stage.bytes_per_s))}/s", right=True),
    Column("READING", lambda stage: percent(stage.reading), right=True),
    Column("READ TAKES", lambda stage: human_seconds(stage.read_s), right=True),
]
"""Columns of nodes with weights on their disks."""

GUESS_COLUMNS: list[Column[GuessSummary]] = [
    Column("HEAD", lambda head: head.node),
    Column("STEPS WITH GUESSES", lambda head: str(head.steps), right=True),
    Column("GUESSED A STEP", lambda head: f"{head.guessed / head.steps:.1f}", right=True),
    Column("RIGHT A STEP", lambda head: f"{head.right / head.steps:.1f}", right=True),
    Column("ROWS IN VAIN", lambda head: str(head.guessed - head.right), right=True),
]
"""Columns of a head that drafts tokens."""


def picture(traces: Sequence[StageTrace], deployment: str) -> str:
    """An SVG of some steps from the middle of aligned traces: rows for each node's computing,
    sending and reads.

    Steps that are in flight at once differ in colour. A gap in a row of computing is a bubble.
    """
    steps = next(trace.records for trace in traces if trace.records)
    first = max(0, (len(steps) - PICTURED_STEPS) // 2)
    from_s = steps[first].began_s
    until_s = steps[min(first + PICTURED_STEPS, len(steps)) - 1].ended_s
    turns = max(2, most_in_flight(traces))
    visits = [
        visit
        for number, trace in enumerate(traces)
        for visit in _visits(trace, _next(traces, number), turns)
    ]
    pictured_visits = [
        visit._replace(start_s=max(0.0, visit.start_s - from_s), end_s=visit.end_s - from_s)
        for visit in visits
        if visit.end_s > from_s and visit.start_s < until_s
    ]
    title = (
        f"{deployment}: {1000 * (until_s - from_s):.1f} ms, {from_s:.2f} s after the trace began"
    )
    return timeline(pictured_visits, title, until_s - from_s, names=("turn", "step"))


def _next(traces: Sequence[StageTrace], number: int) -> str:
    return traces[(number + 1) % len(traces)].node


def _visits(trace: StageTrace, receiver: str, turns: int) -> Iterator[Visit]:
    """The stage's steps, computing first, so that its two rows are in this order."""
    for record in trace.records:
        kind = "prefill" if record.prompt_tokens else "decode"
        station = f"{trace.node} {trace.layers}"
        yield Visit(station, record.step % turns, kind, record.step, record.began_s, record.ended_s)
    for record in trace.records:
        if record.sent_s > record.ended_s:
            station = f"{trace.node} → {receiver}"
            yield Visit(
                station, record.step % turns, "send", record.step, record.ended_s, record.sent_s
            )
    for read in trace.reads:
        yield Visit(
            f"{trace.node} reads",
            read.layer % turns,
            "read",
            read.layer,
            read.began_s,
            read.ended_s,
        )
