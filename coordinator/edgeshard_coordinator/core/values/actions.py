"""The coordinator's actions. An executor performs them and reports their outcomes as events."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import Command, CommandKey, CommandKind, ReleaseStage
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, OperationId
from edgeshard_coordinator.core.values.jobs import Measured
from edgeshard_coordinator.core.values.measurements import Measurements
from edgeshard_coordinator.core.values.state import DeploymentRecord, HeldStage, KnownNode


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Put a command on a node's control stream, if that is still the stream numbered
    `connection`."""

    node_id: NodeId
    connection: int
    command_key: CommandKey
    command: Command

    @property
    def operation_id(self) -> OperationId:
        return self.command_key.operation_id


@dataclass(frozen=True, slots=True)
class ReleaseOrphans:
    """Have a node release stages of deployments that were deleted; one action, for there may be
    thousands."""

    instance: str
    node_id: NodeId
    connection: int
    stages: tuple[HeldStage, ...]

    @property
    def commands(self) -> tuple[SendCommand, ...]:
        """One for each, with keys that no deployment's record has."""
        return tuple(
            SendCommand(
                self.node_id,
                self.connection,
                CommandKey(
                    f"{self.instance}-{self.connection}-{deployment}", epoch, CommandKind.RELEASE, 0
                ),
                ReleaseStage(deployment, epoch),
            )
            for deployment, epoch in self.stages
        )


@dataclass(frozen=True, slots=True)
class TellUnknownStages:
    """Log that a node holds stages of unknown deployments: they are left unchanged."""

    node_id: NodeId
    node_name: NodeName
    connection: int
    stages: tuple[HeldStage, ...]


@dataclass(frozen=True, slots=True)
class SaveDeployment:
    """Write the record, and `others` of the same name that are due as well, with their served
    operations, in one transaction; answered by DeploymentSaved or SaveFailed for each."""

    record: DeploymentRecord
    others: tuple[DeploymentRecord, ...] = ()

    @property
    def records(self) -> tuple[DeploymentRecord, ...]:
        return (*self.others, self.record)


@dataclass(frozen=True, slots=True)
class ForgetDeployment:
    """Remove the record from disk and keep its last epoch; answered by DeploymentForgotten or
    SaveFailed."""

    record: DeploymentRecord


@dataclass(frozen=True, slots=True)
class SaveNode:
    node: KnownNode


@dataclass(frozen=True, slots=True)
class SaveMeasurements:
    """Write all of a node's measurements, in place of those on disk."""

    node_id: NodeId
    measurements: Measurements


@dataclass(frozen=True, slots=True)
class TellMeasured:
    """Let the operator's call know that a node's part of it is over."""

    measured: Measured


@dataclass(frozen=True, slots=True)
class EndService:
    """Close the Attach stream of this deployment's epoch. Its requests wait for the next one, or
    fail with `failure` if there will be none (`final`)."""

    deployment: DeploymentName
    epoch: Epoch
    failure: EdgeShardError
    final: bool


@dataclass(frozen=True, slots=True)
class Replan:
    """Find a placement without the losses, from the state of `version`; answered by Replanned."""

    deployment: DeploymentName
    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class PlanStandby:
    """Choose nodes that keep weights for this deployment, from the state of `version`; answered by
    StandbyPlanned."""

    deployment: DeploymentName
    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Close the control stream of a node that went silent."""

    node_id: NodeId
    connection: int


Action = (
    SendCommand
    | ReleaseOrphans
    | TellUnknownStages
    | SaveDeployment
    | ForgetDeployment
    | SaveNode
    | SaveMeasurements
    | TellMeasured
    | EndService
    | Replan
    | PlanStandby
    | DropConnection
)
