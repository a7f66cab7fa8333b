"""The coordinator's whole state as one frozen value, and its invariants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeshard.domain.control.commands import NO_TERM, Term
from edgeshard.domain.deployments.deployment import (
    Deployment,
    DeploymentPhase,
    DeploymentSpec,
    SuspectHop,
    running_requests,
)
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    Epoch,
    ModelName,
    NodeId,
    NodeName,
    OperationId,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts, HugePages, Node, StagePhase, StageStatus
from edgeshard.domain.nodes.labels import check_labels
from edgeshard.domain.nodes.profile import LinkProfile
from edgeshard_coordinator.core.values import authority
from edgeshard_coordinator.core.values.candidate import Candidate, held_bytes
from edgeshard_coordinator.core.values.jobs import Job, Measured, ProbeTry, Retake
from edgeshard_coordinator.core.values.measurements import (
    Measurements,
    ProfileKey,
    Reported,
    busy_w_of,
    disk_of,
)
from edgeshard_coordinator.core.values.token_bucket import TokenBucket

NO_EPOCH = Epoch(0)
"""An epoch below all that there are."""
HeldStage = tuple[DeploymentName, Epoch]
"""A stage as `ReleaseStage` names it."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Limits in seconds."""

    heartbeat_timeout_s: float = 10.0
    """A connected node that is silent for longer is taken for lost."""
    unconnected_s: float = 60.0
    """A node that registered and has not connected by then is forgotten."""
    lease_s: float = 10.0
    """Time for nodes to return if the coordinator itself may have been at fault
    (`core.nodes.lost_nodes`)."""
    stall_s: float = 1.5
    """Ticks are half a second apart; two further apart mean that the coordinator stood still."""
    activate_timeout_s: float = 60.0
    """Time from every stage prepared to an attached head."""
    suspect_wait_s: float = 0.75
    suspect_silence_s: float = 1.0
    """A node counts as silent if nothing arrives from it between one second before a link of it is
    suspect and this long after. Its deployment then continues without it."""
    suspect_limit_s: float = 2.0
    """If by then the two nodes of a suspect link have not both sent something, the one that sent
    earlier counts as silent."""
    bad_link_s: float = 60.0
    """Time for which a link that was at fault is remembered."""
    reattach_timeout_s: float = 5.0
    """Time in which a head that detached may attach again at the same epoch."""
    load_timeout_s: float = 600.0
    """A node that loads a stage without progress for this time counts as lost."""
    retry_first_s: float = 1.0
    retry_limit_s: float = 30.0
    """A deployment that was ready and failed to load again retries after the first delay, doubled
    up to the limit."""
    steady_s: float = 30.0
    """A stage that fails sooner after READY has cut its epoch short: each such epoch but the first
    waits as a retry does."""
    measure_timeout_s: float = 3600.0
    probe_timeout_s: float = 120.0
    """Time for the layers of a model, and for one batch of links."""
    probe_quiet_s: float = 5.0
    """Time for which the site must have been quiet before the coordinator has links and layers
    measured by itself."""
    probe_retry_first_s: float = 10.0
    probe_retry_limit_s: float = 600.0
    probe_attempts: int = 6
    """A link whose probe fails is tried again with these delays, and then not until one of its
    nodes restarts."""
    retake_quiet_s: float = 30.0
    """Time for which a node must have been quiet before layers that it measured while busy are
    measured again."""
    retake_first_s: float = 60.0
    retake_limit_s: float = 3600.0
    retake_attempts: int = 6
    """The same for such a measurement, which a node that is never quiet would repeat for ever, and
    for a first one that fails, until the node restarts."""


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node that registered once. `connection` numbers its control stream, 0 while there is none.

    While it is `starting`, its facts are from its last run; if the node never ran before, they may
    be incomplete.
    """

    node_id: NodeId
    name: NodeName
    address: str
    wire_version: int
    facts: DeviceFacts
    incarnation: str = ""
    starting: bool = False
    connection: int = 0
    joined: bool = True
    """Whether it ever had a control stream; only then is it on disk
    (`core.nodes.unconnected_nodes`)."""
    heard_at: float = 0.0
    others_at: float = 0.0
    """Time when others last took more of its cores than a measurement tolerates; at first, the time
    of its connection."""
    stages: tuple[StageStatus, ...] = ()
    reported: bool = False
    """Whether it has sent a heartbeat over this connection."""
    huge_pages: HugePages | None = None
    packed: tuple[int, ...] = ()
    """Ids of the units that it keeps packed. Not on disk."""
    saved: bool = False
    released: frozenset[HeldStage] = frozenset()
    """Stages that this connection was commanded to release and the node still names: the heartbeat
    was sent before, or the release is under way."""
    excused: bool = False
    """Whether a silence of it was attributed to the coordinator since its last message."""
    own_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels from the agent's settings."""
    set_labels: Mapping[str, str | None] = field(default_factory=dict)
    """Labels set by an operator, which take precedence; None if it removes a label of the
    agent's."""
    unknown_stages_told: bool = False
    """Whether the log reports that it holds stages of unknown deployments; once for each
    connection."""

    @property
    def connected(self) -> bool:
        return self.connection != 0

    @property
    def placeable(self) -> bool:
        """Whether layers can be placed on it, and measurements requested from it."""
        return self.connected and not self.starting

    @property
    def labels(self) -> dict[str, str]:
        """Those that hold."""
        both = {**self.own_labels, **self.set_labels}
        return {key: value for key, value in both.items() if value is not None}

    def relabelled(self, labels: Mapping[str, str], removed: Collection[str]) -> KnownNode:
        """The node with an operator's labels. Raises InvalidArgumentError naming `labels` if there
        are too many."""
        hidden = dict.fromkeys(key for key in removed if key in self.own_labels)
        other_labels = {key: value for key, value in self.set_labels.items() if key not in removed}
        node = replace(self, set_labels={**other_labels, **hidden, **labels}, saved=False)
        check_labels(node.labels, "labels")
        return node


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one command: the connection it was last sent on (0: not yet), and whether it
    was answered."""

    sent_on: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True)
class ServedOperation:
    """A mutating call that took effect, kept so that its repeat gets the same answer. `outcome` is
    opaque here."""

    operation_id: OperationId
    fingerprint: str
    outcome: bytes


@dataclass(frozen=True, slots=True)
class RefusedOperation:
    """A mutating call that the disk did not take: it changed nothing."""

    operation_id: OperationId
    failure: EdgeShardError


@dataclass(frozen=True, slots=True)
class EndedService:
    """An epoch that stopped serving; its running requests are to fail with `failure`."""

    epoch: Epoch
    failure: EdgeShardError


@dataclass(frozen=True, slots=True)
class SuspectLink:
    """A link that carries nothing, as the node of its sending stage reported at `since`, with its
    reason. If `sender` is None the link is the coordinator's own, to the head of the deployment:
    both stages are 0.

    Nothing is decided while the coordinator itself stands still: a time without checks, from
    `checked_at` on, moves `since`.
    """

    deployment: DeploymentName
    epoch: Epoch
    from_stage: int
    to_stage: int
    sender: NodeId | None
    receiver: NodeId
    since: float
    checked_at: float
    why: str

    @property
    def ends(self) -> tuple[NodeId, ...]:
        return (self.receiver,) if self.sender is None else (self.receiver, self.sender)


@dataclass(frozen=True, slots=True)
class StandbyChoice:
    """A node and the layers it is to keep; `reserved_bytes` are for them, and for the stages when
    they run."""

    node_id: NodeId
    node_name: NodeName
    layers: LayerRange
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Standby:
    """The layers that a node is to keep in memory for a deployment, or None to keep nothing any
    more. `number` is that of its command.

    `reserved_bytes` of its memory count as taken.
    """

    number: int
    node_id: NodeId
    epoch: Epoch
    layers: LayerRange | None
    reserved_bytes: int = 0
    sent: Progress = Progress()


@dataclass(frozen=True, slots=True)
class Move:
    """Another placement at an operator's request: the deployment continues with it, at `epoch`,
    once `revision` is on disk."""

    placement: Placement
    epoch: Epoch
    revision: int


STANDBY_SEARCHES = TokenBucket(rate=0.1, holds_s=50.0)
"""A few searches in a row, then one in ten seconds: facts of nodes may change all the time, and no
request waits for standbys."""


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """A deployment, the progress of its commands for the current epoch, and the part of it that is
    on disk.

    `uid` distinguishes it from an earlier deployment of the same name. `revision` counts changes
    that must be saved; `saving` is the newest one handed to the disk and `saved_epoch` the newest
    epoch known to be there.
    """

    uid: str
    spec: DeploymentSpec
    manifest_digest: Digest
    placement: Placement
    epoch: Epoch
    phase: DeploymentPhase = DeploymentPhase.LOADING
    ever_ready: bool = False
    failure: EdgeShardError | None = None
    prepared: tuple[Progress, ...] = ()
    released: tuple[Progress, ...] = ()
    activated: Progress = Progress()
    attachment: int = 0
    """Number of the head's Attach stream, 0 while there is none."""
    deadline: float | None = None
    """When LOADING or ACTIVATING has taken too long."""
    loaded_bytes: int = 0
    """Bytes of it that the nodes have fetched, by their last reports while it was loading."""
    not_before: float = 0.0
    """Earliest time WAITING may end."""
    failed_attempts: int = 0
    ready_at: float = 0.0
    """When it was last ready for the first time in its epoch."""
    short_lives: int = 0
    """Epochs in a row that one of its stages ended soon after it was ready."""
    adoptable: bool = False
    """Its nodes may still hold this very epoch, from before the coordinator's restart."""
    was_ready: bool = False
    """Whether it was ready before that restart, at the epoch that it began with."""
    avoided: frozenset[NodeId] = frozenset()
    """Nodes that failed to load it, or were silent when a link of it stalled, since it last was
    ready."""
    planned_for: int = -1
    """The version of the state in which a placement without the lost nodes was last searched."""
    searching: bool = False
    """Whether a search is under way, for such a placement or for standbys: there is one at a
    time."""
    search_after: float = 0.0
    """Earliest time of the next search."""
    standbys: tuple[Standby, ...] = ()
    standby_for: int = -1
    """The version of the state that they were last chosen in."""
    standby_count: int = 0
    standby_searches: TokenBucket = STANDBY_SEARCHES
    """Searches for standbys that it may begin, one token each."""
    ended: EndedService | None = None
    revision: int = 1
    saving: int = 0
    saved: int = 0
    saved_epoch: Epoch = NO_EPOCH
    save_after: float = 0.0
    operations: tuple[ServedOperation, ...] = ()
    """Saved in one transaction with the record, and dropped from here once that is done or has
    failed."""
    delete_revision: int = 0
    """The revision from which the disk has it as deleting, which it is once that is there; 0 if
    there is no such request."""
    move: Move | None = None
    former: Placement | None = None
    """The placement before its move, until it is ready with the new one: it returns there if the
    move fails. Not on disk."""
    forgetting: bool = False
    forced: bool = False
    """Whether its deletion waits for no node. Not on disk."""
    shape: str = ""
    """The shape of its model, by which `State.configs` has the config; "" if that is unknown. Not
    on disk."""

    @property
    def name(self) -> DeploymentName:
        return DeploymentName(self.spec.name)

    @property
    def served_name(self) -> DeploymentName:
        """The name that clients use, which replicas share."""
        return DeploymentName(self.spec.served_name)

    @property
    def model(self) -> ModelName:
        return ModelName(self.spec.model)

    @property
    def head(self) -> PlacedStage:
        return self.placement.head

    @property
    def running_requests(self) -> int:
        """The most requests that run at once."""
        return running_requests(self.spec, self.placement)

    @property
    def is_live(self) -> bool:
        """Whether the current epoch is being opened or is open."""
        return self.phase in (
            DeploymentPhase.LOADING,
            DeploymentPhase.ACTIVATING,
            DeploymentPhase.READY,
        )

    @property
    def durable(self) -> bool:
        return self.saved == self.revision

    @property
    def on_disk(self) -> DeploymentRecord:
        """The record that the disk gets: a deletion and a move take effect when they are there."""
        if self.delete_revision:
            return replace(self, phase=DeploymentPhase.DELETING)
        if self.move is not None:
            loading = DeploymentPhase.LOADING
            return replace(
                self, phase=loading, placement=self.move.placement, epoch=self.move.epoch
            )
        return self


def fresh_progress(placement: Placement) -> tuple[Progress, ...]:
    return (Progress(),) * len(placement.stages)


@dataclass(frozen=True, slots=True)
class State:
    """`instance` names this run of the coordinator. `version` counts changes a placement depends
    on."""

    instance: str
    timings: Timings = Timings()
    term: Term = NO_TERM
    epoch_floor: Epoch = NO_EPOCH
    """An epoch above all that the site issued before this run, whatever its disk has lost: the
    clock at the start, in milliseconds since 1970."""
    nodes: Mapping[NodeId, KnownNode] = field(default_factory=dict)
    deployments: Mapping[DeploymentName, DeploymentRecord] = field(default_factory=dict)
    retired: Mapping[DeploymentName, Epoch] = field(default_factory=dict)
    """Last epoch of each deleted deployment: a name used again starts above it, so an epoch never
    repeats."""
    measured: Mapping[NodeId, Measurements] = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()
    """Jobs in the order of the requests."""
    told: tuple[Measured, ...] = ()
    """Jobs that ended, until the operator's call is notified."""
    tries: Mapping[NodeId, Mapping[NodeId, ProbeTry]] = field(default_factory=dict)
    """Links whose probe failed, by sender and receiver."""
    retakes: tuple[Retake, ...] = ()
    """Measurements of layers on nodes that were busy with something else."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Decoded config.json of models that nodes are measured for, by `config_hash`: measured on one,
    or deployed."""
    profile_tries: Mapping[NodeId, Mapping[ProfileKey, ProbeTry]] = field(default_factory=dict)
    """First measurements of layers that were begun by themselves and have given nothing."""
    suspects: tuple[SuspectLink, ...] = ()
    """Links of live epochs, until they recover or the epoch ends."""
    bad_links: Mapping[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    """Links that were at fault, by sender and receiver: until when to avoid them."""
    busy_at: float = 0.0
    """When the site was last busy with something that a probe would disturb."""
    refused: tuple[RefusedOperation, ...] = ()
    """The newest ones, for the calls that wait to be notified."""
    ticked_at: float | None = None
    """Time of the newest tick; None before the first."""
    frozen_until: float = 0.0
    """The time before which no node is taken for lost (`core.nodes.lost_nodes`)."""
    awaited: Mapping[NodeId, float] = field(default_factory=dict)
    """Nodes that are away and whose deployments do not break before a time."""
    vanished: tuple[tuple[NodeId, float], ...] = ()
    """Nodes whose control streams ended in the last seconds, and when."""
    probe_turn: int = 0
    """The position of the node whose missing links are searched next. `probe_count` counts the
    coordinator's own measurements."""
    probe_count: int = 0
    version: int = 0
    node_versions: Mapping[NodeId, int] = field(default_factory=dict)
    """The version in which the connection, address or labels of a node last changed, or in which it
    left."""

    def with_record(self, record: DeploymentRecord) -> State:
        return replace(self, deployments={**self.deployments, record.name: record})

    def with_node(self, node: KnownNode) -> State:
        return replace(self, nodes={**self.nodes, node.node_id: node})

    def links_from(self, node_id: NodeId) -> Mapping[NodeId, Reported[LinkProfile]]:
        """The measured links of a node, by receiver."""
        measurements = self.measured.get(node_id)
        return {} if measurements is None else measurements.links

    def is_connected(self, node_id: NodeId) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and node.connected

    def is_placeable(self, node_id: NodeId) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and node.placeable

    def pending_operation(
        self, name: DeploymentName, operation_id: OperationId
    ) -> ServedOperation | None:
        """A call on a deployment that the disk has neither taken nor refused yet; for replicas, on
        one of them."""
        operations = (
            operation for record in self.replicas_of(name) for operation in record.operations
        )
        return next(
            (operation for operation in operations if operation.operation_id == operation_id), None
        )

    def refusal(self, operation_id: OperationId) -> EdgeShardError | None:
        return next(
            (item.failure for item in self.refused if item.operation_id == operation_id), None
        )

    def find_node(self, name_or_id: str) -> KnownNode | None:
        """The node with this id, else with this name; of two with one name the connected one."""
        by_id = self.nodes.get(NodeId(name_or_id))
        named = [node for node in self.nodes.values() if node.name == name_or_id]
        return by_id or next(
            (node for node in named if node.connected), named[0] if named else None
        )

    def node_named(self, name_or_id: str) -> KnownNode:
        """The node with this id or name, as `find_node`. Raises NotFoundError naming `node`."""
        node = self.find_node(name_or_id)
        if node is None:
            raise NotFoundError(f"node: there is no node {name_or_id[:80]!r}", field="node")
        return node

    def deployment_named(self, name: str, field: str = "name") -> DeploymentRecord:
        """The deployment of this name, or the first replica of it. Raises NotFoundError naming
        `field`, the request's field with the name."""
        records = self.replicas_of(DeploymentName(name))
        if not records:
            raise NotFoundError(f"{field}: there is no deployment {name[:80]!r}", field=field)
        return records[0]

    def one_deployment(self, name: str, field: str = "name") -> DeploymentRecord:
        """As `deployment_named`; raises InvalidArgumentError naming `field` for a name that
        replicas have in common."""
        records = self.replicas_of(DeploymentName(name))
        if len(records) > 1:
            names = ", ".join(record.name for record in records)
            raise InvalidArgumentError(
                f"{field}: {name} has {len(records)} replicas; name one of {names}", field=field
            )
        return self.deployment_named(name, field)

    def replicas_of(self, name: DeploymentName) -> tuple[DeploymentRecord, ...]:
        """The deployment of this name; of a name that replicas have in common, each of them in
        their order."""
        record = self.deployments.get(name)
        if record is not None:
            return (record,)
        replicas = [record for record in self.deployments.values() if record.served_name == name]
        return tuple(sorted(replicas, key=lambda record: record.spec.replica))

    def siblings_of(self, spec: DeploymentSpec) -> tuple[DeploymentRecord, ...]:
        """The other replicas of its name, if it is one."""
        if not spec.replica:
            return ()
        return tuple(
            other
            for other in self.replicas_of(DeploymentName(spec.served_name))
            if other.name != spec.name
        )

    def first_epoch(self, name: DeploymentName) -> Epoch:
        """The epoch at which a deployment of this name begins: above its last one."""
        return self.epoch_after(name, self.retired.get(name, NO_EPOCH))

    def epoch_after(self, name: DeploymentName, last: Epoch) -> Epoch:
        """The epoch after `last`, the highest that this coordinator knows of a deployment.

        A node may hold a higher one if the coordinator lost its state or was restored from a
        backup, and it refuses lower ones. A node's word is no epoch, though: any such claim only
        moves the next epoch above `epoch_floor`.
        """
        stages = (stage for node in self.nodes.values() for stage in node.stages)
        if any(stage.deployment == name and stage.epoch > last for stage in stages):
            last = max(last, self.epoch_floor)
        return Epoch(last + 1)

    def free_bytes(self, node: KnownNode, without: DeploymentName | None = None) -> int:
        """The node's memory budget less what deployments hold, except the deployment `without`."""
        used_bytes = sum(
            held_bytes(stage) for stage in self._placed(without) if stage.node_id == node.node_id
        )
        used_bytes += sum(
            entry.reserved_bytes
            for entry in self._standbys(without)
            if entry.node_id == node.node_id
        )
        return max(0, node.facts.memory_budget_bytes - used_bytes)

    def holds_still(self, spec: DeploymentSpec, placement: Placement, version: int) -> bool:
        """Whether a placement found in the state of `version` is right in this one. Its nodes are
        there as they were and have its memory. None holds another replica of the name."""
        siblings = {
            stage.node_id for other in self.siblings_of(spec) for stage in other.placement.stages
        }
        return all(
            self._is_as_before(stage.node_id, version)
            and stage.node_id not in siblings
            and held_bytes(stage)
            <= self.free_bytes(self.nodes[stage.node_id], DeploymentName(spec.name))
            for stage in placement.stages
        )

    def standby_holds_still(
        self, name: DeploymentName, choice: StandbyChoice, version: int
    ) -> bool:
        """As `holds_still`, for the memory of a standby of the deployment `name`."""
        if not self._is_as_before(choice.node_id, version):
            return False
        record, node = self.deployments[name], self.nodes[choice.node_id]
        own = sum(
            held_bytes(stage)
            for stage in record.placement.stages
            if stage.node_id == choice.node_id
        )
        return choice.reserved_bytes <= self.free_bytes(node, name) - own

    def _is_as_before(self, node_id: NodeId, version: int) -> bool:
        return self.is_placeable(node_id) and self.node_versions.get(node_id, 0) <= version

    def candidates(self, without: DeploymentName | None = None) -> tuple[Candidate, ...]:
        """Every known node as the placer sees it, by name, with the memory of the deployment
        `without` counted as free.

        It takes a moment for many nodes: call it off the loop.
        """
        used_bytes: dict[NodeId, int] = {}
        for stage in self._placed(without):
            used_bytes[stage.node_id] = used_bytes.get(stage.node_id, 0) + held_bytes(stage)
        for entry in self._standbys(without):
            used_bytes[entry.node_id] = used_bytes.get(entry.node_id, 0) + entry.reserved_bytes
        own = self.deployments.get(without) if without is not None else None
        warm = (
            {entry.node_id: entry.layers for entry in own.standbys if self._is_warm(entry)}
            if own
            else {}
        )
        ordered = sorted(self.nodes.values(), key=lambda node: (node.name, node.node_id))
        return tuple(
            Candidate(
                node_id=node.node_id,
                name=node.name,
                address=node.address,
                free_bytes=max(0, node.facts.memory_budget_bytes - used_bytes.get(node.node_id, 0)),
                connected=node.connected,
                facts=node.facts,
                starting=node.starting,
                warm=warm.get(node.node_id),
                packed=node.packed,
                disk=disk_of(self.measured.get(node.node_id)),
                labels=node.labels,
                busy_w=busy_w_of(self.measured.get(node.node_id)),
            )
            for node in ordered
        )

    def _placed(self, without: DeploymentName | None = None) -> Iterator[PlacedStage]:
        for record in self.deployments.values():
            if record.phase is not DeploymentPhase.FAILED and record.name != without:
                yield from record.placement.stages
                yield from record.move.placement.stages if record.move is not None else ()

    def _is_warm(self, entry: Standby) -> bool:
        node = self.nodes.get(entry.node_id)
        return entry.sent.done and node is not None and entry.sent.sent_on == node.connection

    def _standbys(self, without: DeploymentName | None = None) -> Iterator[Standby]:
        for record in self.deployments.values():
            if record.name != without:
                yield from record.standbys


def is_left_over(state: State, node: KnownNode, stage: StageStatus) -> bool:
    """Whether a node holds a stage of an epoch that continues without it."""
    record = state.deployments.get(stage.deployment)
    if record is None or record.phase is not DeploymentPhase.READY:
        return False
    if stage.phase is StagePhase.STANDBY:
        return False  # `core.deployments.standby` decides about it
    return all(placed.node_id != node.node_id for placed in record.placement.stages)


def missing_nodes(state: State, record: DeploymentRecord) -> tuple[NodeName, ...]:
    """Names of the deployment's nodes that are not connected, or not done with starting."""
    return tuple(
        stage.node_name
        for stage in record.placement.stages
        if not state.is_placeable(stage.node_id)
    )


def lost_nodes(state: State, record: DeploymentRecord) -> tuple[NodeName, ...]:
    """Names of its missing nodes that are not awaited: without these its epoch cannot continue."""
    stages = record.placement.stages
    lost_stages = (
        stage
        for stage in stages
        if stage.node_id not in state.awaited and not state.is_placeable(stage.node_id)
    )
    return tuple(stage.node_name for stage in lost_stages)


def node_view(state: State, node: KnownNode, now: float) -> Node:
    return Node(
        node_id=node.node_id,
        name=node.name,
        address=node.address,
        wire_version=node.wire_version,
        facts=node.facts,
        connected=node.connected,
        heartbeat_age_s=max(0.0, now - node.heard_at) if node.heard_at else 0.0,
        free_bytes=state.free_bytes(node),
        stages=node.stages,
        huge_pages=node.huge_pages,
        starting=node.starting,
        labels=node.labels,
    )


def deployment_view(state: State, record: DeploymentRecord, active_requests: int = 0) -> Deployment:
    stages = [
        status
        for placed in record.placement.stages
        if (node := state.nodes.get(placed.node_id)) is not None
        for status in node.stages
        if status.stage == placed.index
        and authority.speaks_for_stage(record, placed.node_id, status)
    ]
    suspects = tuple(
        SuspectHop(suspect.from_stage, suspect.to_stage, suspect.why)
        for suspect in state.suspects
        if (suspect.deployment, suspect.epoch) == (record.name, record.epoch)
    )
    return Deployment(
        record.spec,
        record.phase,
        record.epoch,
        record.placement,
        record.failure,
        tuple(stages),
        active_requests,
        suspects=suspects,
    )


def validate_state(state: State) -> None:
    """Raise InternalError naming the first invariant that does not hold."""
    connected = [node for node in state.nodes.values() if node.connected]
    _hold(
        len({node.name for node in connected}) == len(connected),
        "two connected nodes have one name",
    )
    _hold(
        len({node.connection for node in connected}) == len(connected),
        "two nodes share a connection",
    )
    for node_id, node in state.nodes.items():
        _hold(node.node_id == node_id, f"node {node_id} is filed under another id")
    for node_id in state.awaited:
        _hold(
            node_id in state.nodes and not state.is_connected(node_id),
            f"node {node_id} is awaited and not away",
        )
    for name, record in state.deployments.items():
        _hold(record.name == name, f"deployment {name} is filed under another name")
        _validate_record(state, record)
    for suspect in state.suspects:
        live = state.deployments.get(suspect.deployment)
        _hold(
            live is not None and live.is_live and live.epoch == suspect.epoch,
            "a link of no live epoch is suspect",
        )
    _hold(
        all(sender != receiver for sender, receiver in state.bad_links),
        "a node has a bad link to itself",
    )
    _validate_jobs(state)


def _validate_jobs(state: State) -> None:
    under_way = [job for job in state.jobs if job.sent is not None]
    probing = [job for job in under_way if job.probing]
    _hold(
        len({job.node_id for job in under_way}) == len(under_way),
        "a node measures two things at once",
    )
    _hold(not probing or len(under_way) == 1, "links are measured while something else is")
    for job in state.jobs:
        node = state.nodes.get(job.node_id)
        _hold(
            node is not None and node.connection == job.connection != 0,
            f"node {job.node_id} is away and measures",
        )
    for sender, measurements in state.measured.items():
        _hold(sender in state.nodes, f"there are measurements of {sender}, which is not a node")
        _hold(sender not in measurements.links, f"node {sender} measured a link to itself")


def _validate_record(state: State, record: DeploymentRecord) -> None:
    phase, where = record.phase, f"deployment {record.name} in {record.phase}"
    all_prepared = all(progress.done for progress in record.prepared)
    _hold(record.epoch > state.retired.get(record.name, 0), f"{where}: its epoch was used before")
    _hold(0 <= record.saved_epoch <= record.epoch, f"{where}: an epoch is on disk that is not yet")
    _hold(record.saved <= record.saving <= record.revision, f"{where}: revisions are out of order")
    _hold(
        record.delete_revision <= record.revision,
        f"{where}: it is deleted at a revision that is not yet",
    )
    if any(progress.sent_on for progress in record.prepared):
        _hold(
            record.saved_epoch == record.epoch,
            f"{where}: a stage was prepared before its epoch was on disk",
        )
    if record.activated.sent_on:
        _hold(all_prepared, f"{where}: the head was activated before every stage was prepared")
    _hold(
        len(record.prepared) == len(record.placement.stages),
        f"{where}: progress does not match the stages",
    )
    if phase in (DeploymentPhase.LOADING, DeploymentPhase.ACTIVATING, DeploymentPhase.READY):
        _hold(not lost_nodes(state, record), f"{where}: a node is away")
    if phase in (DeploymentPhase.ACTIVATING, DeploymentPhase.READY):
        _hold(all_prepared, f"{where}: a stage is not prepared")
    if phase in (DeploymentPhase.LOADING, DeploymentPhase.ACTIVATING):
        _hold(record.deadline is not None, f"{where}: there is no deadline")
    if phase is DeploymentPhase.READY:
        _hold(
            record.activated.done and record.attachment != 0, f"{where}: the head is not attached"
        )
        _hold(
            record.ever_ready and record.failure is None,
            f"{where}: it counts as never ready or as failed",
        )
    _hold(record.move is None or phase is DeploymentPhase.READY, f"{where}: it is about to move")
    on_the_way = (DeploymentPhase.LOADING, DeploymentPhase.ACTIVATING, DeploymentPhase.WAITING)
    _hold(
        record.former is None or phase in on_the_way, f"{where}: it has a placement to go back to"
    )
    if phase is DeploymentPhase.FAILED:
        _hold(
            record.failure is not None and not record.ever_ready,
            f"{where}: without a reason, or after READY",
        )


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(f"invariant broken: {message}", reason="INVARIANT")
