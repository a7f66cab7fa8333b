"""The coordinator's reports of nodes and models, and an operator's call to measure: message <-> value."""

from __future__ import annotations

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
from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.models.packed import PackedOn
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.proto.v1 import common_pb2, inference_pb2, profile_pb2
from edgeshard.wire.codec import by_hand, pair
from edgeshard.wire.profile import link_from_wire, link_to_wire


def stored_link_to_wire(stored: StoredLink) -> profile_pb2.MeasuredLink:
    message = link_to_wire(stored.link)
    message.age_s = stored.age_s
    return message


def stored_link_from_wire(message: profile_pb2.MeasuredLink) -> StoredLink:
    return StoredLink(link_from_wire(message), message.age_s)


by_hand(StoredLink, profile_pb2.MeasuredLink, stored_link_to_wire, stored_link_from_wire)
stored_model_to_wire, stored_model_from_wire = pair(StoredModel, pb.StoredModel)
served_model_to_wire, served_model_from_wire = pair(ServedModel, inference_pb2.ServedModel)
stored_profile_to_wire, stored_profile_from_wire = pair(StoredProfile, pb.StoredProfile)
node_details_to_wire, node_details_from_wire = pair(NodeDetails, pb.GetNodeResponse)
unknown_figures_to_wire, unknown_figures_from_wire = pair(UnknownFigures, pb.UnknownFigures)
unknown_profile_to_wire, unknown_profile_from_wire = pair(UnknownProfile, pb.UnknownProfile)
site_to_wire, _site_from_wire = pair(Site, pb.GetSiteResponse)
packed_on_to_wire, packed_on_from_wire = pair(PackedOn, pb.PackedOnNode)
measure_request_to_wire, _measure_request_from_wire = pair(MeasureRequest, pb.ProfileRequest)


def site_from_wire(message: pb.GetSiteResponse) -> Site:
    """Raises InvalidArgumentError for figures that cannot be, InternalError for a config that is not JSON."""
    try:
        return _site_from_wire(message)
    except InvalidArgumentError as error:
        if error.field != "config_json":
            raise
        raise InternalError(f"the coordinator's answer: {error.message}", field=error.field) from None


def measure_request_from_wire(message: pb.ProfileRequest) -> MeasureRequest:
    """Raises InvalidArgumentError naming the field. The data type may be left out where only links are measured."""
    if not message.dtype and not message.model:
        message = pb.ProfileRequest.FromString(message.SerializeToString())
        message.dtype = common_pb2.DATA_TYPE_BFLOAT16
    return _measure_request_from_wire(message)


node_progress_to_wire, node_progress_from_wire = pair(NodeProgress, pb.ProfileResponse)
