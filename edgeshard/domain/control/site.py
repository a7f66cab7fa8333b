"""The coordinator's reports of its nodes, models and events, and an operator's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement, Prediction
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Traffic
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    ModelName,
    NodeId,
    NodeName,
    OperationId,
    check_digest,
    check_id,
)
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import FurtherBlocks, ModelManifest, RowOrder
from edgeshard.domain.models.packed_units import PackedOn
from edgeshard.domain.nodes.device import Condition, Node
from edgeshard.domain.nodes.profile import ComputeProfile, MeasuredLink

LONGEST_MEASURING_S = 600.0
"""The longest that a deployment may wait for measurements."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file outside of the coordinator's store that has `size_bytes` of a model's weights.

    `in_place`: the store reads the file itself; otherwise it has a hard link to it. `changed`: the
    file is not as it was when the model was added, so that its weights cannot be read any more.
    """

    path: str
    size_bytes: int
    in_place: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the coordinator's store. `stored_bytes` is its size there; `max_context` is in
    tokens.

    `further` are the blocks of its checkpoint that predict further tokens, which are not there.
    `weights_files` have those weights that are not in files of the store only.
    """

    name: ModelName
    manifest_digest: Digest
    architecture: str
    layer_count: int
    parameter_count: int
    stored_bytes: int
    dtype: DType
    max_context: int
    further: FurtherBlocks | None = None
    weights_files: tuple[WeightsFile, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A deployment that answers requests. `max_context` is prompt and new tokens together,
    `max_new_tokens` the most new tokens of one request; 0 if it is not known."""

    deployment: DeploymentName
    model: ModelName
    max_context: int
    max_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MissingBlob:
    """A blob the store lacks: `received` of its `size` bytes are there already."""

    digest: Digest
    size: int
    received: int


@dataclass(frozen=True, slots=True)
class ModelRegistration:
    """The store's answer to a manifest: whether the model is registered now, and otherwise what it
    lacks."""

    registered: bool
    manifest_digest: Digest
    missing: tuple[MissingBlob, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the coordinator's own machine, as the client that names it sees it.

    `head_sha256` is of its first 64 KiB: who knows that can read the file. `stays`: the file is no
    temporary one.
    """

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    head_sha256: Annotated[Digest, check_digest]
    stays: bool = False


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """The place of a tensor or a small file: `offset` in bytes of file number `file`, with rows in
    `order`."""

    file: int
    offset: int
    order: RowOrder | None = None


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on the coordinator's own machine. The manifest has no digests yet; `places` are those
    of its tensors, then of its small files."""

    manifest: ModelManifest
    files: tuple[LocalFile, ...]
    places: tuple[LocalPlace, ...]


@dataclass(frozen=True, slots=True)
class LocalAdding:
    """How far the coordinator is with a local model: bytes hashed, bytes in all, and its digest at
    the end.

    `knows_orders`: the coordinator reads rows in the order of their places.
    """

    hashed: int
    total: int
    manifest_digest: Digest | None = None
    knows_orders: bool = False


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """The beginning of an upload: the blob, and the offset of the following bytes."""

    digest: Annotated[Digest, check_digest]
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlobRange:
    """Bytes [offset, offset + length) of a blob; length 0 means to its end."""

    digest: Annotated[Digest, check_digest]
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A node's profile as the coordinator keeps it, `age_s` seconds old; `models` of the store have
    its shape."""

    node_id: NodeId
    profile: ComputeProfile
    models: tuple[ModelName, ...]
    age_s: float


@dataclass(frozen=True, slots=True)
class StoredLink:
    """A link as its sender measured it `age_s` seconds ago."""

    link: MeasuredLink
    age_s: float


@dataclass(frozen=True, slots=True)
class UnknownProfile:
    """A missing measurement of a node: a shape that `models` of the store have, with weights kept
    so."""

    models: tuple[ModelName, ...]
    dtype: DType
    quantisation: Quantisation | None = None


@dataclass(frozen=True, slots=True)
class UnknownFigures:
    """Missing measurements of a node: its layers, and its ways to the nodes `links`."""

    profiles: tuple[UnknownProfile, ...] = ()
    links: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeDetails:
    """A node with its profiles, the links from and to it, and its missing measurements."""

    node: Node
    profiles: tuple[StoredProfile, ...]
    links: tuple[StoredLink, ...]
    unknown: UnknownFigures = UnknownFigures()


@dataclass(frozen=True, slots=True)
class Site:
    """All that a plan is made from.

    `profiles` are one model's, `config` is its decoded config.json and `traffic` its deployments'
    past traffic. All are empty if no model was requested.
    """

    nodes: tuple[Node, ...]
    links: tuple[StoredLink, ...]
    profiles: tuple[StoredProfile, ...]
    config: Mapping[str, Any]
    traffic: Traffic = NO_TRAFFIC
    coordinator: Condition | None = None
    """The coordinator's report of its own machine."""
    manifest_digest: str = ""
    packed: tuple[PackedOn, ...] = ()
    """What nodes keep packed of any model; like the digest of this one's manifest, for a plan that
    makes use of it."""

    def profiles_of(
        self, dtype: DType, quantisation: Quantisation | None = None
    ) -> dict[NodeId, StoredProfile]:
        """Each node's with weights kept so."""
        return {
            stored.node_id: stored
            for stored in self.profiles
            if (stored.profile.dtype, stored.profile.quantisation) == (dtype, quantisation)
        }


def _seconds(value: Any, field: str) -> Any:
    if not 0.0 <= value <= LONGEST_MEASURING_S:
        why = f"{value} is not from 0 to {LONGEST_MEASURING_S:g} seconds"
        raise InvalidArgumentError(f"{field}: {why}", field=field)
    return value


@dataclass(frozen=True, slots=True)
class DeployCall:
    """An operator's call to deploy. Nodes without a measurement of the model are measured first,
    for up to `measure_s` seconds; 0 places with the known figures."""

    operation_id: OperationId
    spec: DeploymentSpec
    measure_s: Annotated[float, _seconds] = 0.0


@dataclass(frozen=True, slots=True)
class DeleteCall:
    """An operator's call to delete a deployment; with `force` it waits for no node."""

    operation_id: OperationId
    name: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """An operator's call to have nodes measured: `nodes` by name or id, all connected ones if it is
    empty.

    Without `model` only links are measured. `quick` takes fewer points; `again` measures although a
    profile of the same node and shape is remembered.
    """

    operation_id: Annotated[OperationId, check_id]
    model: str = ""
    dtype: DType = DType.BFLOAT16
    nodes: tuple[str, ...] = ()
    quick: bool = False
    again: bool = False
    quantisation: Quantisation | None = None


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Progress of measuring one node: `done` of `total`, and the current work, in words.

    `finished` is True in a node's last one. `failure` then has the reason if it could not be
    measured, and `missed` the nodes to which it could not measure its link.
    """

    node: NodeName
    done: int = 0
    total: int = 0
    what: str = "waiting"
    finished: bool = False
    failure: EdgeShardError | None = None
    missed: tuple[NodeName, ...] = ()


MOST_EVENTS = 1000
"""Most events that a coordinator keeps, and that are read at once."""


class Subject(StrEnum):
    """The thing that an event is about."""

    NODE = "node"
    LINK = "link"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True)
class SiteEvent:
    """`number` counts a coordinator's events from 1 after each of its starts; `time` is UTC by ISO
    8601.

    `name` is the node's or the deployment's, `FROM -> TO` of a link. `what` is one word or two,
    such as `away` or a deployment's phase. `detail` adds more, and may be empty. `warning` is
    whether an operator may have to act.
    """

    number: int
    time: str
    subject: Subject
    name: str
    what: str
    detail: str = ""
    warning: bool = False


NO_OPERATION = OperationId("")


class ReplanReason(StrEnum):
    MOVED = "MOVED"
    """It continues with the new placement."""
    WOULD_MOVE = "WOULD_MOVE"
    """It would move, but this was a dry run."""
    SAME_LAYERS = "SAME_LAYERS"
    """Each node has the layers that it would get."""
    SMALL_GAIN = "SMALL_GAIN"
    """Less than `edgeshard.domain.deployments.traffic.WORTH_SAYING`."""
    NOT_WEIGHED = "NOT_WEIGHED"
    """One of the two placements cannot be predicted."""
    NOTHING_NEW = "NOTHING_NEW"
    """Nodes, links and profiles are the same as for an earlier plan, which found no reason to move
    it."""


@dataclass(frozen=True, slots=True)
class ReplanCall:
    """An operator's call. A dry run changes nothing and has no operation id; `force` moves for any
    gain."""

    name: str
    dry_run: bool = False
    force: bool = False
    operation_id: OperationId = NO_OPERATION


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """A deployment's placement (`current`), compared with the best one for the nodes that are there
    now (`found`).

    `expected` is the current one's prediction now, and `found.predicted` the other's; each is None
    if it is impossible, and the note has the reason. `gain` is the share of the cost that the new
    one saves or, for a rate, by which it is higher; None unless both are predicted.
    """

    current: Placement
    found: Placement
    expected: Prediction | None
    gain: float | None
    reason: ReplanReason
    note: str = ""

    @property
    def changed(self) -> bool:
        return self.reason is ReplanReason.MOVED
