"""Measurements that the coordinator asks of this node: one thing at a time, and no layers while a
stage loads. Pure.

A measurement of layers has the memory that loaded stages leave, so loading a stage first ends one
under way. While stages are loaded, it yields to their steps
(`edgeshard_agent.measuring.measuring_process`).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import MeasureCompute, ProbeLinks
from edgeshard.domain.errors import AbortedError, EdgeShardError, ResourceExhaustedError
from edgeshard.domain.ids import OperationId

MeasuringCommand = MeasureCompute | ProbeLinks


@dataclass(frozen=True, slots=True)
class MeasuringTask:
    """A command to measure, and the operation to answer."""

    operation_id: OperationId
    command: MeasuringCommand


# Events


@dataclass(frozen=True, slots=True)
class MeasuringEnded:
    """The measurement ended by itself, and its results are reported."""

    task: MeasuringTask
    error: EdgeShardError | None = None


@dataclass(frozen=True, slots=True)
class MeasuringStopped:
    """The measurement was stopped by a command; nothing of it is left in memory."""


@dataclass(frozen=True, slots=True)
class ControlLost:
    """The control stream is lost, so a measurement cannot be answered. The coordinator asks again,
    by the same id."""


MeasuringEvent = MeasuringEnded | MeasuringStopped | ControlLost


# Actions


@dataclass(frozen=True, slots=True)
class StartMeasuring:
    """Measure and report."""

    task: MeasuringTask


@dataclass(frozen=True, slots=True)
class StopMeasuring:
    """End the running measurement, and give its memory back."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """`pending_task` is still to be answered; `running` is the executor's, which may be an earlier
    one that is ending.

    `stopping`: the executor has been ordered to end it.
    """

    pending_task: MeasuringTask | None = None
    running: MeasuringTask | None = None
    stopping: bool = False

    @property
    def measures_layers(self) -> bool:
        """Whether a measurement of layers has the node's memory and cores."""
        return self.running is not None and isinstance(self.running.command, MeasureCompute)

    @property
    def startable(self) -> MeasuringTask | None:
        return self.pending_task if self.running is None else None

    @property
    def superfluous(self) -> bool:
        """Whether a measurement runs that is no longer wanted and has not been ordered to stop."""
        return self.running is not None and self.running != self.pending_task and not self.stopping

    def refusal(self, task: MeasuringTask, loads: bool) -> EdgeShardError | None:
        """Why the node cannot do this now, None when it can. `loads`: a stage loads or is about to
        load."""
        if self.pending_task is not None:
            what = (
                "its layers"
                if isinstance(self.pending_task.command, MeasureCompute)
                else "its links"
            )
            return ResourceExhaustedError(
                f"the node is measuring {what}; try again when that is done",
                reason="NODE_MEASURES",
                retry_after_s=5.0,
            )
        return stage_came() if isinstance(task.command, MeasureCompute) and loads else None

    def ended(self, task: MeasuringTask) -> tuple[Measuring, bool]:
        """The state after a measurement's own end, and whether its operation is still to be
        answered."""
        if self.running != task or self.stopping:
            return self, False  # MeasuringStopped follows
        return Measuring(), True


def stage_came() -> EdgeShardError:
    """The answer to a measurement that a stage displaced."""
    return AbortedError(
        "the node received a stage and loads it first; measure again when it is loaded",
        reason="STAGE_CAME",
    )
