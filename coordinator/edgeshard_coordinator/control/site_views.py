"""What was measured, as operators are shown it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgeshard.ids import NodeId
from edgeshard.profile import MeasuredLink, config_hash
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.proto.v1 import profile_pb2
from edgeshard.wire.common import node_to_wire
from edgeshard.wire.profile import compute_profile_to_wire, link_to_wire
from edgeshard.wire.status import to_failure
from edgeshard_coordinator.control.calls import BoxProgress
from edgeshard_coordinator.control.models import Models
from edgeshard_coordinator.core.measurements import ProfileKey
from edgeshard_coordinator.core.state import KnownNode, State, node_view


def node_details(state: State, node: KnownNode, models: Models, now: float) -> pb.GetNodeResponse:
    """A box, all its profiles, and the links from and to it."""
    return pb.GetNodeResponse(
        node=node_to_wire(node_view(state, node, now)),
        profiles=_profiles(state, [node.node_id], models, lambda key: True, now),
        links=_links(state, lambda link: node.node_id in (link.sender, link.receiver), now),
    )


def site_details(state: State, models: Models, model: str, now: float) -> pb.GetSiteResponse:
    """Every box and link, and the profiles of a model in any dtype. Raises NotFoundError for an unknown model."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    response = pb.GetSiteResponse(
        nodes=[node_to_wire(node_view(state, node, now)) for node in nodes],
        links=_links(state, lambda link: True, now),
    )
    if model:
        manifest, _ = models.get(model)
        shape = config_hash(manifest.config)
        response.config_json = manifest.config_json.encode()
        ids = [node.node_id for node in nodes]
        response.profiles.extend(_profiles(state, ids, models, lambda key: key[0] == shape, now))
    return response


def box_progress_to_wire(progress: BoxProgress) -> pb.ProfileResponse:
    return pb.ProfileResponse(
        node=progress.node,
        done=progress.done,
        total=progress.total,
        what=progress.what,
        finished=progress.finished,
        failure=to_failure(progress.failure) if progress.failure is not None else None,
        missed_nodes=progress.missed,
    )


def _profiles(
    state: State, node_ids: Iterable[NodeId], models: Models, wanted: Callable[[ProfileKey], bool], now: float
) -> list[pb.StoredProfile]:
    names: dict[str, list[str]] = {}
    for manifest, _ in models.list():
        names.setdefault(config_hash(manifest.config), []).append(manifest.name)
    return [
        pb.StoredProfile(
            node_id=node_id,
            profile=compute_profile_to_wire(reported.value),
            models=names.get(key[0], []),
            age_s=max(0.0, now - reported.reported_at),
        )
        for node_id in node_ids
        if node_id in state.measured
        for key, reported in state.measured[node_id].profiles.items()
        if wanted(key)
    ]


def _links(state: State, wanted: Callable[[MeasuredLink], bool], now: float) -> list[profile_pb2.MeasuredLink]:
    found = []
    for sender, known in state.measured.items():
        for receiver, reported in known.links.items():
            link = MeasuredLink(sender, receiver, reported.value)
            if wanted(link):
                found.append(link_to_wire(link, max(0.0, now - reported.reported_at)))
    return found
