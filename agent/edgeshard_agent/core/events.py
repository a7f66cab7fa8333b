"""What happens to an agent's state: commands that came, and what became of its actions."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.commands import Command
from edgeshard.device import StageStatus
from edgeshard.errors import EdgeShardError
from edgeshard.ids import DeploymentName, Epoch, OperationId
from edgeshard_agent.core.actions import Action
from edgeshard_agent.core.survey import SurveyEvent
from edgeshard_agent.core.tracing import TraceEnded


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
Event = CommandReceived | StageEvent | StageClosed | SurveyEvent | TraceEnded | ActionStarted
