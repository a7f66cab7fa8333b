"""What an agent tells the coordinator of itself, what the coordinator tells an agent to do, and the agent's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.deployment import DeploymentSpec
from edgeshard.device import DeviceFacts, StageStatus
from edgeshard.dtypes import DType, Quantisation
from edgeshard.errors import EdgeShardError
from edgeshard.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.placement import PlacedStage, Placement
from edgeshard.profile import ComputeProfile, MeasuredLink
from edgeshard.trace import StageTrace


@dataclass(frozen=True, slots=True)
class Registration:
    """A box announcing itself. `address` is its stage listener (host:port).

    `node_id` outlives restarts; `incarnation` is random per process and tells a restart from a reconnect.
    """

    node_id: NodeId
    name: NodeName
    address: str
    wire_version: int
    facts: DeviceFacts
    incarnation: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a box says of itself every second or so. Memory in bytes."""

    node_id: NodeId
    incarnation: str
    stages: tuple[StageStatus, ...]
    memory_available_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareStage:
    """Fetch, load and open one stage at an epoch; KV of a lower epoch is dropped."""

    spec: DeploymentSpec
    placement: Placement
    stage: int
    epoch: Epoch
    manifest_digest: Digest

    @property
    def deployment(self) -> DeploymentName:
        return DeploymentName(self.spec.name)

    @property
    def placed(self) -> PlacedStage:
        return self.placement.stages[self.stage]


@dataclass(frozen=True, slots=True)
class ActivateHead:
    """Open the ring and attach. Sent to the first stage once every stage of the epoch is prepared."""

    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReleaseStage:
    """Drop the stage of this deployment at this epoch or any lower one."""

    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class MeasureCompute:
    """Measure the box's times for a model shape, on random weights. `config` is the model's decoded config.json.

    The weights are in `dtype`, or as `quantisation` says. `quick` takes fewer points; `again` measures although a
    profile of the same box and shape is remembered.
    """

    config: Mapping[str, Any]
    dtype: DType
    quick: bool
    again: bool
    quantisation: Quantisation | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Another box, to be measured against. `address` is its stage listener, host:port."""

    node_id: NodeId
    name: NodeName
    address: str


@dataclass(frozen=True, slots=True)
class ProbeLinks:
    """Measure the ways to other boxes, one after the other."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """Record the steps of a stage for some seconds, then answer with them. A newer one takes the place of an older."""

    deployment: DeploymentName
    epoch: Epoch
    seconds: float


StageCommand = PrepareStage | ActivateHead | ReleaseStage
Command = StageCommand | MeasureCompute | ProbeLinks | TraceSteps


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What a box measured of itself; what is absent stays as it was known."""

    node_id: NodeId
    facts: DeviceFacts | None = None
    compute: tuple[ComputeProfile, ...] = ()
    links: tuple[MeasuredLink, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandProgress:
    """How far a long command is: `done` of `total`, and at what, in words."""

    operation_id: OperationId
    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer to a command; `failure` is None when it succeeded.

    `stage` is what a prepare left behind, `trace` what a trace recorded.
    """

    operation_id: OperationId
    failure: EdgeShardError | None = None
    stage: StageStatus | None = None
    trace: StageTrace | None = None
