"""Measurements that the coordinator asks of this node: one thing at a time, and no layers while it holds a stage. Pure.

A measurement of layers and a stage would slow each other down unnoticed, and share one memory. So the node refuses to
measure while it holds a stage, and loading a stage first ends a measurement under way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edgeshard.domain.control.commands import MeasureCompute, ProbeLinks
from edgeshard.domain.errors import AbortedError, EdgeShardError, FailedPreconditionError, ResourceExhaustedError
from edgeshard.domain.ids import DeploymentName, OperationId

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
    """The measurement ended because it was told to; nothing of it is left in memory."""


@dataclass(frozen=True, slots=True)
class ControlLost:
    """The control stream is lost, so a measurement cannot be answered. The coordinator asks again, by the same id."""


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
    """`wanted` is still to be answered; `running` is the executor's, which may be an earlier one that is ending.

    `stopping` says that the executor was told to end it.
    """

    wanted: MeasuringTask | None = None
    running: MeasuringTask | None = None
    stopping: bool = False

    @property
    def measures_layers(self) -> bool:
        """Whether a measurement of layers has the node's memory and cores."""
        return self.running is not None and isinstance(self.running.command, MeasureCompute)

    @property
    def startable(self) -> MeasuringTask | None:
        return self.wanted if self.running is None else None

    @property
    def superfluous(self) -> bool:
        """Whether a measurement runs that is not wanted any more and was not told so yet."""
        return self.running is not None and self.running != self.wanted and not self.stopping

    def refusal(self, task: MeasuringTask, held: Collection[DeploymentName]) -> EdgeShardError | None:
        """Why the node cannot do this now, None when it can. `held` are the deployments it has a stage of."""
        if self.wanted is not None:
            what = "its layers" if isinstance(self.wanted.command, MeasureCompute) else "its links"
            return ResourceExhaustedError(
                f"the node is measuring {what}; ask again when that is done", reason="NODE_MEASURES", retry_after_s=5.0
            )
        if isinstance(task.command, MeasureCompute) and held:
            return FailedPreconditionError(
                f"the node holds a stage of {', '.join(sorted(held))}: it and the measurement would slow each other "
                "down; delete the deployment first, or leave the node out",
                reason="STAGE_HELD",
            )
        return None

    def ended(self, task: MeasuringTask) -> tuple[Measuring, bool]:
        """The state after a measurement's own end, and whether its operation is still to be answered."""
        if self.running != task or self.stopping:
            return self, False  # MeasuringStopped follows
        return Measuring(), True


def stage_came() -> EdgeShardError:
    """The answer to a measurement that a stage displaced."""
    return AbortedError(
        "a stage came to the node while it was measured; measure again when it holds none", reason="STAGE_CAME"
    )
