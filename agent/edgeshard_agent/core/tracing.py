"""Traces that the coordinator wants of this box's stages: one at a time of each, the newest. Pure.

A trace changes nothing, so nothing of it is remembered: a command that is repeated after its answer traces once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.commands import TraceSteps
from edgeshard.errors import AbortedError, EdgeShardError, FailedPreconditionError
from edgeshard.ids import DeploymentName, Epoch, OperationId
from edgeshard.trace import StageTrace


@dataclass(frozen=True, slots=True)
class WantedTrace:
    """A trace still to be answered; `started` says that the executor is at it."""

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
    """The answer to a trace that a newer one took the place of."""
    return AbortedError(f"another trace of {deployment} began meanwhile", reason="TRACE_REPLACED")


def no_stage(deployment: DeploymentName, epoch: Epoch) -> EdgeShardError:
    """The answer where no such stage runs, or not until the end."""
    return FailedPreconditionError(f"no stage of {deployment} runs at epoch {epoch}", reason="NO_STAGE")
