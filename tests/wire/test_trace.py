"""Traces, and the command for one, over the wire."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from edgeshard.domain.control.commands import CommandResult, TraceSteps
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.requests.trace import MOST_RECORDS, ReadRecord, StageTrace, StepRecord
from edgeshard.proto.v1 import coordinator_pb2
from edgeshard.wire.control import (
    agent_message_from_wire,
    agent_message_to_wire,
    command_from_wire,
    command_to_wire,
)
from edgeshard.wire.site import (
    stage_status_from_wire,
    stage_status_to_wire,
    trace_from_wire,
    trace_to_wire,
)

NAME = DeploymentName("tales")
RECORD = StepRecord(
    2**40,
    6,
    5,
    1e6,
    1e6 + 1e-6,
    1e6 + 0.25,
    1e6 + 0.5,
    1e6 + 1.0,
    guesses=3,
    right_guesses=2,
    came_s=1e6 + 0.9,
)
READ = ReadRecord(5, 2**40, 1e6, 1e6 + 0.25)
TRACE = StageTrace(
    1, "b", LayerRange(4, 9), (RECORD, replace(RECORD, step=2**40 + 1, returned_s=0.0)), (READ,)
)


def test_a_trace_comes_back_as_it_was() -> None:
    assert trace_from_wire(trace_to_wire(TRACE)) == TRACE
    result = CommandResult(OperationId("op"), trace=TRACE)
    assert agent_message_from_wire(agent_message_to_wire(result)) == result


def test_the_command_comes_back_as_it_was() -> None:
    command = TraceSteps(NAME, Epoch(3), 2.5)
    assert command_from_wire(command_to_wire(OperationId("op"), command)) == ("op", command)


@pytest.mark.parametrize("seconds", [0.0, 61.0, math.nan])
def test_a_command_to_trace_for_ever_is_refused(seconds: float) -> None:
    message = coordinator_pb2.ControlResponse(
        trace=coordinator_pb2.TraceSteps(deployment="tales", seconds=seconds)
    )
    with pytest.raises(InvalidArgumentError) as refused:
        command_from_wire(message)
    assert refused.value.field == "seconds"


@pytest.mark.parametrize(
    "changes",
    [
        {"arrived_s": math.nan},
        {"arrived_s": -math.inf},
        {"began_s": 1e6 + 0.3},
        {"sent_s": math.inf},
        {"sent_s": 1e6},
        {"returned_s": math.nan},
        {"returned_s": math.inf},
        {"came_s": math.nan},
    ],
)
def test_times_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    message = trace_to_wire(replace(TRACE, records=(replace(RECORD, **changes),)))
    with pytest.raises(InvalidArgumentError) as refused:
        trace_from_wire(message)
    assert refused.value.field == "records"


def test_a_trace_is_bounded() -> None:
    most = replace(TRACE, records=(RECORD,) * MOST_RECORDS)
    assert trace_from_wire(trace_to_wire(most)) == most
    with pytest.raises(InvalidArgumentError) as refused:
        trace_from_wire(trace_to_wire(replace(most, records=(*most.records, RECORD))))
    assert refused.value.field == "records"


def test_what_a_stage_counts_comes_back_as_it_was() -> None:
    status = StageStatus(
        NAME, Epoch(2), 0, LayerRange(0, 4), StagePhase.ACTIVE, steps_done=9, tokens_done=40,
        busy_share=0.75, steps_waiting=2, requests_running=3, requests_waiting=4, micro_batches=2,
    )  # fmt: skip
    assert stage_status_from_wire(stage_status_to_wire(status)) == status


@pytest.mark.parametrize(
    "changes", [{"began_s": math.nan}, {"ended_s": math.inf}, {"ended_s": 1e6 - 1}]
)
def test_reads_at_times_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        trace_from_wire(trace_to_wire(replace(TRACE, reads=(replace(READ, **changes),))))
    assert refused.value.field == "reads"


def test_more_reads_than_a_trace_holds_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 20000"):
        trace_from_wire(trace_to_wire(replace(TRACE, reads=(READ,) * (MOST_RECORDS + 1))))
