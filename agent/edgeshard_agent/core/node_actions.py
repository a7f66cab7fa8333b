"""Actions that the agent's state requests. An executor performs them and reports the results as
events."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import CommandResult, PrepareStage
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard_agent.core.measuring import StartMeasuring, StopMeasuring
from edgeshard_agent.core.standby import SetStandby
from edgeshard_agent.core.tracing import StartTrace


@dataclass(frozen=True, slots=True)
class ReportStarted:
    """Tell the coordinator that this node can compute, and what with."""

    facts: DeviceFacts


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Fetch and open this stage; it replaces the stage of a lower epoch, whose weights may be
    reused."""

    prepare: PrepareStage


@dataclass(frozen=True, slots=True)
class OpenHead:
    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CloseStage:
    deployment: DeploymentName


@dataclass(frozen=True, slots=True)
class SendResults:
    results: tuple[CommandResult, ...]


Action = (
    ReportStarted
    | LoadStage
    | OpenHead
    | CloseStage
    | SendResults
    | SetStandby
    | StartMeasuring
    | StopMeasuring
    | StartTrace
)
