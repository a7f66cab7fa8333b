"""The coordinator's reports of nodes and models, and an operator's call to measure: message <-> value."""

from __future__ import annotations

import json
from typing import Any

from edgeshard.domain.control.site import (
    MeasureRequest,
    NodeDetails,
    NodeProgress,
    ServedModel,
    Site,
    StoredLink,
    StoredModel,
    StoredProfile,
    UnknownFigures,
    UnknownProfile,
)
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import ModelName, NodeId, NodeName, OperationId, check_id
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.packed import PackedOn
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.proto.v1 import common_pb2, inference_pb2, profile_pb2
from edgeshard.wire.common import (
    condition_from_wire,
    condition_to_wire,
    dtype_from_wire,
    dtype_to_wire,
    message_of,
    node_from_wire,
    node_to_wire,
    quantisation_from_wire,
    quantisation_to_wire,
    value_of,
)
from edgeshard.wire.deployment import traffic_from_wire, traffic_to_wire
from edgeshard.wire.profile import (
    compute_profile_from_wire,
    compute_profile_to_wire,
    link_from_wire,
    link_to_wire,
)
from edgeshard.wire.status import from_failure, to_failure


def stored_model_to_wire(model: StoredModel) -> pb.StoredModel:
    return message_of(model, pb.StoredModel, dtype=dtype_to_wire(model.dtype))


def stored_model_from_wire(message: pb.StoredModel) -> StoredModel:
    return value_of(message, StoredModel, dtype=dtype_from_wire(message.dtype))


def served_model_to_wire(model: ServedModel) -> inference_pb2.ServedModel:
    return message_of(model, inference_pb2.ServedModel)


def served_model_from_wire(message: inference_pb2.ServedModel) -> ServedModel:
    return value_of(message, ServedModel)


def stored_profile_to_wire(stored: StoredProfile) -> pb.StoredProfile:
    return message_of(stored, pb.StoredProfile, profile=compute_profile_to_wire(stored.profile))


def stored_profile_from_wire(message: pb.StoredProfile) -> StoredProfile:
    return value_of(
        message,
        StoredProfile,
        profile=compute_profile_from_wire(message.profile),
        models=tuple(ModelName(name) for name in message.models),
    )


def stored_link_to_wire(stored: StoredLink) -> profile_pb2.MeasuredLink:
    message = link_to_wire(stored.link)
    message.age_s = stored.age_s
    return message


def stored_link_from_wire(message: profile_pb2.MeasuredLink) -> StoredLink:
    return StoredLink(link_from_wire(message), message.age_s)


def node_details_to_wire(details: NodeDetails) -> pb.GetNodeResponse:
    return pb.GetNodeResponse(
        node=node_to_wire(details.node),
        profiles=[stored_profile_to_wire(profile) for profile in details.profiles],
        links=[stored_link_to_wire(link) for link in details.links],
        unknown=unknown_figures_to_wire(details.unknown),
    )


def node_details_from_wire(message: pb.GetNodeResponse) -> NodeDetails:
    return NodeDetails(
        node=node_from_wire(message.node),
        profiles=tuple(stored_profile_from_wire(profile) for profile in message.profiles),
        links=tuple(stored_link_from_wire(link) for link in message.links),
        unknown=unknown_figures_from_wire(message.unknown),
    )


def unknown_figures_to_wire(unknown: UnknownFigures) -> pb.UnknownFigures:
    return pb.UnknownFigures(
        profiles=[unknown_profile_to_wire(profile) for profile in unknown.profiles], links=unknown.links
    )


def unknown_figures_from_wire(message: pb.UnknownFigures) -> UnknownFigures:
    return UnknownFigures(
        profiles=tuple(unknown_profile_from_wire(profile) for profile in message.profiles),
        links=tuple(NodeName(name) for name in message.links),
    )


def unknown_profile_to_wire(profile: UnknownProfile) -> pb.UnknownProfile:
    return pb.UnknownProfile(
        models=profile.models,
        dtype=dtype_to_wire(profile.dtype),
        quantisation=quantisation_to_wire(profile.quantisation),
    )


def unknown_profile_from_wire(message: pb.UnknownProfile) -> UnknownProfile:
    return UnknownProfile(
        models=tuple(ModelName(name) for name in message.models),
        dtype=dtype_from_wire(message.dtype),
        quantisation=quantisation_from_wire(message.quantisation),
    )


def site_to_wire(site: Site) -> pb.GetSiteResponse:
    return pb.GetSiteResponse(
        nodes=[node_to_wire(node) for node in site.nodes],
        links=[stored_link_to_wire(link) for link in site.links],
        profiles=[stored_profile_to_wire(profile) for profile in site.profiles],
        config_json=json.dumps(dict(site.config)).encode() if site.config else b"",
        traffic=traffic_to_wire(site.traffic),
        coordinator=condition_to_wire(site.coordinator) if site.coordinator is not None else None,
        manifest_digest=site.manifest_digest,
        packed=[packed_on_to_wire(packed) for packed in site.packed],
    )


def site_from_wire(message: pb.GetSiteResponse) -> Site:
    """Raises InvalidArgumentError for figures that cannot be, InternalError for a config that is not JSON."""
    return Site(
        nodes=tuple(node_from_wire(node) for node in message.nodes),
        links=tuple(stored_link_from_wire(link) for link in message.links),
        profiles=tuple(stored_profile_from_wire(profile) for profile in message.profiles),
        config=_config_from_wire(message.config_json),
        traffic=traffic_from_wire(message.traffic),
        coordinator=condition_from_wire(message.coordinator) if message.HasField("coordinator") else None,
        manifest_digest=message.manifest_digest,
        packed=tuple(packed_on_from_wire(packed) for packed in message.packed),
    )


def packed_on_to_wire(packed: PackedOn) -> pb.PackedOnNode:
    return pb.PackedOnNode(node_id=packed.node_id, units=common_pb2.PackedIds(ids=packed.ids))


def packed_on_from_wire(message: pb.PackedOnNode) -> PackedOn:
    return PackedOn(NodeId(message.node_id), tuple(message.units.ids))


def _config_from_wire(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InternalError("config_json: the coordinator's answer is not a JSON object", field="config_json")
    return values


def measure_request_to_wire(request: MeasureRequest) -> pb.ProfileRequest:
    return message_of(
        request,
        pb.ProfileRequest,
        dtype=dtype_to_wire(request.dtype),
        quantisation=quantisation_to_wire(request.quantisation),
    )


def measure_request_from_wire(message: pb.ProfileRequest) -> MeasureRequest:
    """Raises InvalidArgumentError naming the field. The data type may be left out where only links are measured."""
    return value_of(
        message,
        MeasureRequest,
        operation_id=OperationId(check_id(message.operation_id, "operation_id")),
        dtype=dtype_from_wire(message.dtype) if message.dtype or message.model else DType.BFLOAT16,
        nodes=tuple(message.nodes),
        quantisation=quantisation_from_wire(message.quantisation),
    )


def node_progress_to_wire(progress: NodeProgress) -> pb.ProfileResponse:
    return pb.ProfileResponse(
        node=progress.node,
        done=progress.done,
        total=progress.total,
        what=progress.what,
        finished=progress.finished,
        failure=to_failure(progress.failure) if progress.failure is not None else None,
        missed_nodes=progress.missed,
    )


def node_progress_from_wire(message: pb.ProfileResponse) -> NodeProgress:
    return value_of(
        message,
        NodeProgress,
        failure=from_failure(message.failure) if message.HasField("failure") else None,
        missed=tuple(NodeName(name) for name in message.missed_nodes),
    )
