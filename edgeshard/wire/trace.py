"""Traces of stages: message <-> value."""

from __future__ import annotations

import math
from itertools import pairwise

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.trace import MOST_RECORDS, ReadRecord, StageTrace, StepRecord
from edgeshard.proto.v1 import trace_pb2 as pb
from edgeshard.wire.common import layers_from_wire, layers_to_wire, message_of, value_of


def trace_to_wire(trace: StageTrace) -> pb.StageTrace:
    return pb.StageTrace(
        stage=trace.stage,
        node=trace.node,
        layers=layers_to_wire(trace.layers),
        records=[message_of(record, pb.StepRecord) for record in trace.records],
        reads=[message_of(read, pb.ReadRecord) for read in trace.reads],
    )


def trace_from_wire(message: pb.StageTrace) -> StageTrace:
    """Raises InvalidArgumentError for more records than a trace may have, or times that cannot be."""
    for field, count in (("records", len(message.records)), ("reads", len(message.reads))):
        if count > MOST_RECORDS:
            raise InvalidArgumentError(
                f"{field}: a stage's trace holds at most {MOST_RECORDS}, not {count}", field=field
            )
    return StageTrace(
        stage=message.stage,
        node=message.node,
        layers=layers_from_wire(message.layers),
        records=tuple(_record_from_wire(record) for record in message.records),
        reads=tuple(_read_from_wire(read) for read in message.reads),
    )


def _record_from_wire(message: pb.StepRecord) -> StepRecord:
    times = (message.arrived_s, message.began_s, message.ended_s, message.sent_s)
    # In this order, which nan and infinity never are.
    if not (all(a <= b for a, b in pairwise(times)) and math.isfinite(times[-1] - times[0])):
        raise InvalidArgumentError(
            f"records: step {message.step} has times that are no times or out of order", field="records"
        )
    if not math.isfinite(message.returned_s):
        raise InvalidArgumentError(f"records: step {message.step} returned at no time", field="records")
    return StepRecord(message.step, message.tokens, message.prompt_tokens, *times, message.returned_s)


def _read_from_wire(message: pb.ReadRecord) -> ReadRecord:
    if not (message.began_s <= message.ended_s and math.isfinite(message.ended_s - message.began_s)):
        raise InvalidArgumentError(
            f"reads: layer {message.layer} has times that are no times or out of order", field="reads"
        )
    expert = message.expert if message.HasField("expert") else None
    return value_of(message, ReadRecord, expert=expert)
