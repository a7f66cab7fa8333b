"""The coordinator's events. Every event carries its time (`now`, monotonic seconds) as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.control.commands import (
    CommandResult,
    Heartbeat,
    MeasureCompute,
    ProfileReport,
    Registration,
)
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard_coordinator.core.values.actions import Action
from edgeshard_coordinator.core.values.state import DeploymentRecord, ServedOperation, StandbyChoice


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    registration: Registration
    now: float


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """A control stream opened; `connection` is greater than every earlier one's."""

    node_id: NodeId
    incarnation: str
    connection: int
    now: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    node_id: NodeId
    connection: int
    now: float


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """An operator took a node out of the site."""

    node_id: NodeId
    now: float


@dataclass(frozen=True, slots=True)
class NodeLabelled:
    """An operator set labels of a node and removed others."""

    node_id: NodeId
    labels: Mapping[str, str]
    removed: tuple[str, ...]
    now: float


@dataclass(frozen=True, slots=True)
class HeartbeatsReceived:
    """The newest heartbeats of nodes whose control streams are open, together because there are
    many."""

    heartbeats: tuple[Heartbeat, ...]
    now: float

    @property
    def rough_bytes(self) -> int:
        """The rough size, by hand, because the ring of events would walk through all of them ten
        times a second."""
        return sum(450 + 1000 * len(heartbeat.stages) for heartbeat in self.heartbeats)


@dataclass(frozen=True, slots=True)
class LinkReported:
    """A node reports that a link of its stage to the next one carries nothing, or that it does
    again."""

    node_id: NodeId
    suspected: LinkSuspected
    now: float


@dataclass(frozen=True, slots=True)
class HeadReported:
    """The coordinator's own watch reports that nothing arrives from a head with requests, or that
    it does again."""

    deployment: DeploymentName
    epoch: Epoch
    recovered: bool
    why: str
    now: float


@dataclass(frozen=True, slots=True)
class ProfileReported:
    report: ProfileReport
    now: float


@dataclass(frozen=True, slots=True)
class MeasureRequested:
    """The operator's call `uid` has nodes measure layers (`compute`, if any) and links: missing
    ones, or every one."""

    uid: str
    node_ids: tuple[NodeId, ...]
    compute: MeasureCompute | None
    every_link: bool
    now: float


@dataclass(frozen=True, slots=True)
class DeployRequested:
    """A placement was found from the state of `snapshot_version`; on a newer state it is refused.

    `config` is the model's decoded config.json: nodes are measured for a model that is deployed.
    `others` are the replicas before this one, which are saved with it. A replica without others
    joins those that there are.
    """

    record: DeploymentRecord
    snapshot_version: int
    operation: ServedOperation
    now: float
    config: Mapping[str, Any] | None = None
    others: tuple[DeploymentRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplanRequested:
    """The deployment `uid` is to continue with a placement that was found from the state of
    `snapshot_version`; on a newer state it is refused. It takes effect when it is on disk."""

    deployment: DeploymentName
    uid: str
    placement: Placement
    snapshot_version: int
    operation: ServedOperation
    now: float


@dataclass(frozen=True, slots=True)
class DeleteRequested:
    """An operator deletes a deployment. It takes effect when it is on disk; with `force` it is gone
    then, though nodes may not have released it yet."""

    deployment: DeploymentName
    operation: ServedOperation
    now: float
    force: bool = False


@dataclass(frozen=True, slots=True)
class ModelDeleted:
    """No model of this shape (`config_hash`) is left in the store: no node is to be measured for
    it."""

    shape: str
    now: float


@dataclass(frozen=True, slots=True)
class CommandAnswered:
    node_id: NodeId
    result: CommandResult
    now: float


@dataclass(frozen=True, slots=True)
class HeadAttached:
    """A head dialled in; `attachment` is greater than every earlier one's."""

    node_id: NodeId
    deployment: DeploymentName
    epoch: Epoch
    attachment: int
    now: float


@dataclass(frozen=True, slots=True)
class HeadDetached:
    deployment: DeploymentName
    attachment: int
    now: float


@dataclass(frozen=True, slots=True)
class DeploymentSaved:
    """Revision `revision` of the deployment `uid` is on disk, with its epoch."""

    deployment: DeploymentName
    uid: str
    revision: int
    epoch: Epoch
    now: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The disk refused `revision`. The save is tried again after `retry_after_s`; calls that wait
    fail."""

    deployment: DeploymentName
    uid: str
    revision: int
    failure: EdgeShardError
    retry_after_s: float
    now: float


@dataclass(frozen=True, slots=True)
class DeploymentForgotten:
    """The deployment is no longer on disk."""

    deployment: DeploymentName
    uid: str
    now: float


@dataclass(frozen=True, slots=True)
class Replanned:
    """The outcome of a Replan: a placement found from the state of `version`, or the error why
    there is none."""

    deployment: DeploymentName
    uid: str
    version: int
    found: Placement | EdgeShardError
    now: float


@dataclass(frozen=True, slots=True)
class StandbyPlanned:
    """The nodes that are to keep weights for a deployment, chosen from the state of `version`."""

    deployment: DeploymentName
    uid: str
    version: int
    chosen: tuple[StandbyChoice, ...]
    now: float


@dataclass(frozen=True, slots=True)
class ActionIssued:
    """An action is about to be performed; issued before its performance, so that reconcile requests
    it once."""

    action: Action
    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed. `active_requests` are those that the site is serving."""

    now: float
    active_requests: int = 0


Event = (
    NodeRegistered
    | NodeConnected
    | NodeDisconnected
    | NodeRemoved
    | NodeLabelled
    | HeartbeatsReceived
    | LinkReported
    | HeadReported
    | ProfileReported
    | MeasureRequested
    | DeployRequested
    | ReplanRequested
    | DeleteRequested
    | ModelDeleted
    | CommandAnswered
    | HeadAttached
    | HeadDetached
    | DeploymentSaved
    | SaveFailed
    | DeploymentForgotten
    | Replanned
    | StandbyPlanned
    | ActionIssued
    | Ticked
)
