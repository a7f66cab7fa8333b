"""Events of an agent: commands that came, and outcomes of its actions."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import Command
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, OperationId
from edgeshard.domain.nodes.device import DeviceFacts, StageStatus
from edgeshard_agent.core.measuring import MeasuringEvent
from edgeshard_agent.core.node_actions import Action
from edgeshard_agent.core.standby import StandbySet
from edgeshard_agent.core.tracing import TraceEnded


@dataclass(frozen=True, slots=True)
class Started:
    """The node can compute: torch is imported, and `facts` are complete."""

    facts: DeviceFacts


@dataclass(frozen=True, slots=True)
class CommandReceived:
    operation_id: OperationId
    command: Command


@dataclass(frozen=True, slots=True)
class StageLoaded:
    deployment: DeploymentName
    epoch: Epoch
    status: StageStatus


@dataclass(frozen=True, slots=True)
class StageLoadFailed:
    deployment: DeploymentName
    epoch: Epoch
    error: EdgeShardError


@dataclass(frozen=True, slots=True)
class HeadActivated:
    deployment: DeploymentName
    epoch: Epoch
    error: EdgeShardError | None = None


@dataclass(frozen=True, slots=True)
class StageBroke:
    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class StageClosed:
    deployment: DeploymentName


@dataclass(frozen=True, slots=True)
class ActionStarted:
    action: Action


StageEvent = StageLoaded | StageLoadFailed | HeadActivated | StageBroke
Event = (
    Started
    | CommandReceived
    | StageEvent
    | StageClosed
    | StandbySet
    | MeasuringEvent
    | TraceEnded
    | ActionStarted
)
