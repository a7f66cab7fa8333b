"""An agent's reports to the coordinator, the coordinator's commands to an agent, and the agent's
answers.

A heartbeat after the first one of a control stream holds only changes. Both ends keep the whole:
the agent the one it has sent, the coordinator the one it has received. Pure.

For an agent the id of a command is opaque. The coordinator, which made it of a `CommandKey`, gets
the key back from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from edgeshard.domain.checks import First, at_most
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, invalid
from edgeshard.domain.identity import Denial
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    Epoch,
    Figure,
    NodeId,
    NodeName,
    OperationId,
    Text,
    check_digest,
    check_id,
    check_name,
    check_short,
)
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.domain.nodes.device import Condition, DeviceFacts, HugePages, StageKey, StageStatus
from edgeshard.domain.nodes.labels import check_labels
from edgeshard.domain.nodes.profile import ComputeProfile, Effort, MeasuredLink
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard.domain.requests.trace import StageTrace, check_seconds

MOST_STAGES = 512
"""Stages of one node. A node with memory for a few layers holds a few; more are a fault or an
attack."""
MOST_PACKED = 1 << 15
"""Most packed units that a node reports: 500 dense models have this many."""
MAX_LISTED_PACKED = 4096
"""Packed units of one answer, with their names; a message with more took the coordinator seconds to
read."""
MAX_REPORTED_PROFILES = 4
"""Profiles of one report; an agent sends one."""
MAX_REPORTED_LINKS = 4096
MOST_PART_BYTES = 1 << 20
"""Most bytes of a dump in one message."""


def check_stage_count(count: int, field: str = "stages") -> None:
    """Raise InvalidArgumentError naming the field for more than a node can hold."""
    if count > MOST_STAGES:
        why = f"a heartbeat names {count} stages and {MOST_STAGES} is the most that a node can hold"
        raise InvalidArgumentError.about(
            field, f"{why}; restart the agent of this node", "TOO_MANY_STAGES"
        )


def _first_packed(ids: tuple[int, ...], _: str) -> tuple[int, ...]:
    return ids[:MOST_PACKED]


_Stages = Annotated[tuple[StageStatus, ...], First(check_stage_count)]
_PackedIds = Annotated[tuple[int, ...], _first_packed]


@dataclass(frozen=True, slots=True)
class Registration:
    """A node announcing itself. `address` is its stage listener (host:port).

    `node_id` outlives restarts. `incarnation` is random per process and distinguishes a restart
    from a reconnect. A node is `starting` until it has imported its compute libraries. Until then
    no layers are placed on it, and its facts may be incomplete. `labels` are from its settings.
    """

    node_id: Annotated[NodeId, check_id]
    name: Annotated[NodeName, check_name]
    address: Annotated[str, check_id]
    wire_version: int
    facts: DeviceFacts
    incarnation: Annotated[str, check_id]
    starting: bool = False
    labels: Annotated[Mapping[str, str], check_labels] = field(default_factory=dict)

    def check(self) -> None:
        self.facts.check_told()


@dataclass(frozen=True, slots=True)
class Term:
    """Which run of a coordinator: `number` counts those that began with one state, whose random
    name is `site`.

    A node that has followed a term follows no lower one of the same site. A coordinator with a
    lower term was replaced, or has an old copy of the state.
    """

    site: str = ""
    number: int = 0


NO_TERM = Term()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's report of itself, every second or so. Memory in bytes.

    `huge_pages` is None if the system does not report it. `others_share` is the processor time that
    other processes took from the cores the node computes on, as a part of theirs. `packed` are the
    ids of its packed units as numbers, rising. On the wire only the first heartbeat of a control
    stream is whole (`edgeshard.domain.control.commands`)."""

    node_id: Annotated[NodeId, check_short]
    incarnation: Annotated[str, check_short]
    stages: _Stages
    memory_available_bytes: int
    huge_pages: HugePages | None = None
    others_share: Figure = 0.0
    packed: _PackedIds = ()


@dataclass(frozen=True, slots=True)
class HeartbeatChange:
    """Changes since the heartbeat before on the same control stream: stages that are new or differ,
    stages that are gone, and figures, of which None is as it was. It is `urgent` if a stage is new,
    gone, at another epoch or in another phase."""

    stages: _Stages = ()
    removed: Annotated[tuple[StageKey, ...], First(check_stage_count)] = ()
    memory_available_bytes: int | None = None
    huge_pages: HugePages | None = None
    others_share: Figure | None = None
    urgent: bool = False
    packed: _PackedIds | None = None


@dataclass(frozen=True, slots=True)
class PrepareStage:
    """Fetch, load and open one stage at an epoch; KV of a lower epoch is dropped."""

    spec: DeploymentSpec
    placement: Placement
    stage: int
    epoch: Epoch
    manifest_digest: Annotated[Digest, check_digest]

    def check(self) -> None:
        if not self.stage < len(self.placement.stages):
            raise InvalidArgumentError(f"stage {self.stage} is not in the placement", field="stage")

    @property
    def deployment(self) -> DeploymentName:
        return DeploymentName(self.spec.name)

    @property
    def placed(self) -> PlacedStage:
        return self.placement.stages[self.stage]


@dataclass(frozen=True, slots=True)
class ActivateHead:
    """Open the ring and attach. Sent to the first stage once every stage of the epoch is
    prepared."""

    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReleaseStage:
    """Drop the stage of this deployment at this epoch or any lower one."""

    deployment: DeploymentName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class KeepStandby:
    """Keep the weights of these layers in memory, in addition to the node's own stages, for a stage
    that another node may lose.

    They replace what the node kept for this deployment; without layers it keeps none any more.
    `node` is the node itself.
    """

    spec: DeploymentSpec
    epoch: Epoch
    manifest_digest: Annotated[Digest, check_digest]
    node: Annotated[NodeName, check_name]
    layers: LayerRange | None

    @property
    def deployment(self) -> DeploymentName:
        return DeploymentName(self.spec.name)


@dataclass(frozen=True, slots=True)
class MeasureCompute:
    """Measure the node's times for a model shape, on random weights. `config` is the model's
    decoded config.json.

    The weights are in `dtype`, or quantised by `quantisation`. A kept profile of the same node and
    shape is enough if it took as much effort, unless `again` is set.
    """

    config: Mapping[str, Any]
    dtype: DType
    effort: Effort
    again: bool
    quantisation: Quantisation | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A node whose link is measured. `address` is its stage listener, host:port."""

    node_id: Annotated[NodeId, check_id]
    name: Annotated[NodeName, check_name]
    address: Annotated[str, check_id]


@dataclass(frozen=True, slots=True)
class ProbeLinks:
    """Measure the links to other nodes, one after the other."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """Record the steps of a stage for some seconds, then answer with them. A newer trace replaces
    an older one."""

    deployment: DeploymentName
    epoch: Epoch
    seconds: Annotated[float, check_seconds]


class CommandKind(StrEnum):
    """The purpose of a command, in its key."""

    PREPARE = "prepare"
    ACTIVATE = "activate"
    RELEASE = "release"
    STANDBY = "standby"
    MEASURE = "measure"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class CommandKey:
    """Which command an answer belongs to. Its text is the command's operation id.

    `uid` identifies the purpose of the command (a deployment, an operator's call, a trace) and
    holds no "/". `epoch` is the deployment's, 0 if there is none. `stage` is the stage's index; for
    a measurement the number of earlier ones, for a standby its own number.
    """

    uid: str
    epoch: Epoch
    kind: CommandKind
    stage: int

    @property
    def operation_id(self) -> OperationId:
        return OperationId(f"{self.uid}/{self.epoch}/{self.kind}/{self.stage}")

    @classmethod
    def parse(cls, text: str) -> CommandKey:
        """The key whose `operation_id` is `text`. Raises InvalidArgumentError naming `operation_id`
        for any other."""
        match text.split("/"):
            case [uid, epoch, kind, stage] if (
                uid and kind in set(CommandKind) and _is_whole(epoch) and _is_whole(stage)
            ):
                return cls(uid, Epoch(int(epoch)), CommandKind(kind), int(stage))
        raise invalid(
            "operation_id",
            f"{text[:80]!r} is not of the form UID/EPOCH/KIND/STAGE",
            "INVALID_OPERATION_ID",
        )


def _is_whole(text: str) -> bool:
    """Whether it is a whole number as Python writes it, so that each key has one text. At most 20
    digits: 64 bits."""
    return (
        text.isascii() and text.isdecimal() and len(text) <= 20 and (text == "0" or text[0] != "0")
    )


@dataclass(frozen=True, slots=True)
class TakeDump:
    """Say what the agent knows and did lately, by `DumpPart`s. Not for its state: nothing there
    depends on it."""


@dataclass(frozen=True, slots=True)
class ListPacked:
    """Say which packed units the node keeps. Not for the agent's state."""


@dataclass(frozen=True, slots=True)
class DropPacked:
    """Remove these packed units, or all that are not in use if none is named. If one does not
    exist, nothing is removed.

    Not for the agent's state: units in use are not touched.
    """

    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deny:
    """Whose certificates the agent is to refuse from now on. Not answered, and not for its state
    either."""

    denials: tuple[Denial, ...]


StageCommand = PrepareStage | ActivateHead | ReleaseStage
Command = StageCommand | KeepStandby | MeasureCompute | ProbeLinks | TraceSteps
ControlMessage = Command | TakeDump | ListPacked | DropPacked | Deny
"""Messages down a control stream."""


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """A node's measurements of itself; parts that are absent stay as they are known."""

    node_id: Annotated[NodeId, check_id]
    facts: DeviceFacts | None = None
    compute: Annotated[tuple[ComputeProfile, ...], at_most(MAX_REPORTED_PROFILES)] = ()
    links: Annotated[tuple[MeasuredLink, ...], at_most(MAX_REPORTED_LINKS)] = ()

    def check(self) -> None:
        if self.facts is not None:
            self.facts.check_told()
        if any(link.sender != self.node_id or link.receiver == self.node_id for link in self.links):
            raise InvalidArgumentError(
                "links: a node reports the ways from itself to others only",
                field="links",
                reason="FOREIGN_LINK",
            )


@dataclass(frozen=True, slots=True)
class ControlHello:
    """The first message of a node's control stream: whose it is."""

    node_id: Annotated[NodeId, check_short]
    incarnation: Annotated[str, check_short]


@dataclass(frozen=True, slots=True)
class CommandProgress:
    """Progress of a long command: `done` of `total`, and its current work, in words."""

    operation_id: Annotated[OperationId, check_short]
    done: int
    total: int
    what: Text


@dataclass(frozen=True, slots=True)
class DumpPart:
    """A part of an agent's dump, which is JSON text in UTF-8; `last` ends it."""

    operation_id: Annotated[OperationId, check_short]
    part: Annotated[bytes, at_most(MOST_PART_BYTES, "bytes")]
    last: bool


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer to a command; `failure` is None when it succeeded.

    `stage` is the status after a prepare, `trace` the record of a trace. `packed` are the requested
    units: all, or those to be dropped, some of which may be in use and still there.
    """

    operation_id: Annotated[OperationId, check_short]
    failure: EdgeShardError | None = None
    stage: StageStatus | None = None
    trace: StageTrace | None = None
    packed: Annotated[tuple[PackedUnit, ...], at_most(MAX_LISTED_PACKED)] = ()


AgentMessage = (
    ControlHello
    | Heartbeat
    | HeartbeatChange
    | CommandResult
    | CommandProgress
    | DumpPart
    | LinkSuspected
    | Condition
)


HOLDING_INTERVAL_S = 0.9
IDLE_INTERVAL_S = 1.8
"""Seconds between the heartbeats of a node that holds a stage, and of a node without one. Both are
less than the keepalive of a quiet connection, which then never sends a ping."""
MEMORY_NOTICED = 1 / 32
"""Free memory is sent again if it differs by this part of the last value sent."""
SHARE_NOTICED = 0.01
"""The same for the share that others take, as a difference. A share of 0.05 disturbs a
measurement."""
NOTHING = HeartbeatChange()
_FIGURES = ("memory_available_bytes", "huge_pages", "others_share", "packed")
"""Fields of a heartbeat that a change contains if they differ."""


def change_between(base: Heartbeat, now: Heartbeat) -> HeartbeatChange:
    """The change that turns `base` into `now`, without figures that hardly differ.

    A change cannot express a failed reading of huge pages; the last one stays.
    """
    before = {stage.key: stage for stage in base.stages}
    keys = {stage.key for stage in now.stages}
    changed = tuple(stage for stage in now.stages if before.get(stage.key) != stage)
    removed = tuple(key for key in before if key not in keys)
    memory, share = now.memory_available_bytes, now.others_share
    told_memory = base.memory_available_bytes
    return HeartbeatChange(
        stages=changed,
        removed=removed,
        memory_available_bytes=memory
        if abs(memory - told_memory) > MEMORY_NOTICED * told_memory
        else None,
        huge_pages=now.huge_pages if now.huge_pages != base.huge_pages else None,
        others_share=share if abs(share - base.others_share) > SHARE_NOTICED else None,
        packed=now.packed if now.packed != base.packed else None,
        urgent=bool(removed) or any(_is_news(before.get(stage.key), stage) for stage in changed),
    )


def _is_news(before: StageStatus | None, now: StageStatus) -> bool:
    return before is None or (before.epoch, before.phase) != (now.epoch, now.phase)


def with_change(base: Heartbeat, change: HeartbeatChange) -> Heartbeat:
    """The whole heartbeat; `base` itself if nothing changed.

    Raises InvalidArgumentError naming `stages` when the node would hold more than it can.
    """
    if change == NOTHING:
        return base
    stages = base.stages
    if change.stages or change.removed:
        stages_by_key = {stage.key: stage for stage in stages}
        for key in change.removed:
            stages_by_key.pop(key, None)
        stages_by_key.update((stage.key, stage) for stage in change.stages)
        check_stage_count(len(stages_by_key))
        stages = tuple(stages_by_key.values())
    figures = ((name, getattr(change, name)) for name in _FIGURES)
    return replace(
        base, stages=stages, **{name: figure for name, figure in figures if figure is not None}
    )
