"""Traces that the coordinator wants of this node's stages: one at a time of each, the newest. Pure.

A trace changes nothing, so its answer is not kept: a command that is repeated after its answer
traces once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import TraceSteps
from edgeshard.domain.errors import AbortedError, EdgeShardError, FailedPreconditionError
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId
from edgeshard.domain.requests.trace import StageTrace


@dataclass(frozen=True, slots=True)
class WantedTrace:
    """A trace still to be answered; `started` once the executor runs it."""

    operation_id: OperationId
    command: TraceSteps
    started: bool = False


@dataclass(frozen=True, slots=True)
class TraceEnded:
    """Event: the steps were recorded, or why not."""

    operation_id: OperationId
    deployment: DeploymentName
    trace: StageTrace | None = None
    error: EdgeShardError | None = None


@dataclass(frozen=True, slots=True)
class StartTrace:
    """Action: record the stage's steps, in place of any trace of it under way."""

    operation_id: OperationId
    command: TraceSteps


def replaced(deployment: DeploymentName) -> EdgeShardError:
    """The answer to a trace that a newer one replaced."""
    return AbortedError(f"another trace of {deployment} began meanwhile", reason="TRACE_REPLACED")


def no_stage(deployment: DeploymentName, epoch: Epoch) -> EdgeShardError:
    """The answer when no such stage runs, or when it ended during the trace."""
    return FailedPreconditionError(
        f"no stage of {deployment} runs at epoch {epoch}", reason="NO_STAGE"
    )
