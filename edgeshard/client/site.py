"""What the coordinator knows of boxes: their profiles, the links between them, and a measurement as it goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.device import Node
from edgeshard.dtypes import DType, Quantisation
from edgeshard.errors import EdgeShardError, InternalError
from edgeshard.ids import ModelName, NodeId, NodeName
from edgeshard.profile import ComputeProfile, MeasuredLink
from edgeshard.proto.v1 import admin_pb2, profile_pb2
from edgeshard.wire.common import node_from_wire
from edgeshard.wire.profile import compute_profile_from_wire, link_from_wire
from edgeshard.wire.status import from_failure


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A box's profile as the coordinator keeps it, `age_s` seconds old; `models` of the store have its shape."""

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
class NodeDetails:
    """A box with its profiles, and the links from and to it."""

    node: Node
    profiles: tuple[StoredProfile, ...]
    links: tuple[StoredLink, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """All that a plan is made from. `profiles` are those of one model, `config` is its decoded config.json.

    Both are empty where no model was asked for.
    """

    nodes: tuple[Node, ...]
    links: tuple[StoredLink, ...]
    profiles: tuple[StoredProfile, ...]
    config: Mapping[str, Any]

    def profiles_of(self, dtype: DType, quantisation: Quantisation | None = None) -> dict[NodeId, StoredProfile]:
        """Each box's with weights kept so."""
        return {
            stored.node_id: stored
            for stored in self.profiles
            if (stored.profile.dtype, stored.profile.quantisation) == (dtype, quantisation)
        }


@dataclass(frozen=True, slots=True)
class BoxProgress:
    """How far the measuring of one box is: `done` of `total`, and at what, in words.

    `finished` is True in a box's last one; `failure` then says why it could not be measured, if it could not, and
    `missed` which boxes it could not measure its link to.
    """

    node: NodeName
    done: int
    total: int
    what: str
    finished: bool = False
    failure: EdgeShardError | None = None
    missed: tuple[NodeName, ...] = ()


def node_details_from_wire(message: admin_pb2.GetNodeResponse) -> NodeDetails:
    return NodeDetails(
        node=node_from_wire(message.node),
        profiles=tuple(_stored_profile(profile) for profile in message.profiles),
        links=tuple(_stored_link(link) for link in message.links),
    )


def site_from_wire(message: admin_pb2.GetSiteResponse) -> Site:
    """Raises InvalidArgumentError for figures that cannot be, InternalError for a config that is not JSON."""
    return Site(
        nodes=tuple(node_from_wire(node) for node in message.nodes),
        links=tuple(_stored_link(link) for link in message.links),
        profiles=tuple(_stored_profile(profile) for profile in message.profiles),
        config=_config(message.config_json),
    )


def progress_from_wire(message: admin_pb2.ProfileResponse) -> BoxProgress:
    return BoxProgress(
        node=NodeName(message.node),
        done=message.done,
        total=message.total,
        what=message.what,
        finished=message.finished,
        failure=from_failure(message.failure) if message.HasField("failure") else None,
        missed=tuple(NodeName(name) for name in message.missed_nodes),
    )


def _config(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text or b"{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InternalError("config_json: the coordinator's answer is not a JSON object", field="config_json")
    return values


def _stored_profile(message: admin_pb2.StoredProfile) -> StoredProfile:
    return StoredProfile(
        node_id=NodeId(message.node_id),
        profile=compute_profile_from_wire(message.profile),
        models=tuple(ModelName(name) for name in message.models),
        age_s=message.age_s,
    )


def _stored_link(message: profile_pb2.MeasuredLink) -> StoredLink:
    return StoredLink(link_from_wire(message), message.age_s)
