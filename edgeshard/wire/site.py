"""Parts of a site and calls about them: message <-> value.

These are nodes, links and their profiles, deployments, models, events, traces and the audit log.
"""

from __future__ import annotations

from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import (
    DeleteCall,
    DeployCall,
    MeasureRequest,
    NodeDetails,
    NodeProgress,
    ReplanCall,
    ReplanResult,
    ServedModel,
    Site,
    SiteEvent,
    StoredLink,
    StoredModel,
    UnknownFigures,
)
from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.traffic import Traffic
from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.packed_units import DropCall, PackedOn, PackedUnit
from edgeshard.domain.nodes.device import DeviceFacts, Node, StageStatus
from edgeshard.domain.nodes.labels import LabelCall
from edgeshard.domain.nodes.profile import ComputeProfile, MeasuredLink
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.proto.v1 import common_pb2, inference_pb2, profile_pb2, trace_pb2
from edgeshard.wire.codec import by_hand, numbers, pair

placement_to_wire, placement_from_wire = pair(Placement, common_pb2.Placement)
traffic_to_wire, traffic_from_wire = pair(Traffic, common_pb2.Traffic)
spec_to_wire, spec_from_wire = pair(DeploymentSpec, common_pb2.DeploymentSpec)
deployment_to_wire, deployment_from_wire = pair(Deployment, pb.Deployment)
deploy_call_to_wire, deploy_call_from_wire = pair(DeployCall, pb.DeployRequest)
delete_call_to_wire, delete_call_from_wire = pair(DeleteCall, pb.DeleteDeploymentRequest)
replan_call_to_wire, replan_call_from_wire = pair(ReplanCall, pb.ReplanRequest)
replan_to_wire, replan_from_wire = pair(ReplanResult, pb.ReplanResponse)
dtype_to_wire, dtype_from_wire = numbers(DType, common_pb2.DataType, "dtype")
facts_to_wire, facts_from_wire = pair(DeviceFacts, common_pb2.DeviceFacts)
stage_status_to_wire, stage_status_from_wire = pair(StageStatus, common_pb2.StageStatus)
node_to_wire, node_from_wire = pair(Node, common_pb2.Node)
compute_profile_to_wire, compute_profile_from_wire = pair(
    ComputeProfile, profile_pb2.ComputeProfile
)
link_to_wire, link_from_wire = pair(MeasuredLink, profile_pb2.MeasuredLink)


def stored_link_to_wire(stored: StoredLink) -> profile_pb2.MeasuredLink:
    message = link_to_wire(stored.link)
    message.age_s = stored.age_s
    return message


def stored_link_from_wire(message: profile_pb2.MeasuredLink) -> StoredLink:
    return StoredLink(link_from_wire(message), message.age_s)


by_hand(StoredLink, profile_pb2.MeasuredLink, stored_link_to_wire, stored_link_from_wire)
stored_model_to_wire, stored_model_from_wire = pair(StoredModel, pb.StoredModel)
served_model_to_wire, served_model_from_wire = pair(ServedModel, inference_pb2.ServedModel)
node_details_to_wire, node_details_from_wire = pair(NodeDetails, pb.GetNodeResponse)
unknown_figures_to_wire, unknown_figures_from_wire = pair(UnknownFigures, pb.UnknownFigures)
site_to_wire, _site_from_wire = pair(Site, pb.GetSiteResponse)
packed_on_to_wire, packed_on_from_wire = pair(PackedOn, pb.PackedOnNode)
audit_entry_to_wire, audit_entry_from_wire = pair(AuditEntry, pb.AuditEntry)
_check_to_wire, _check_from_wire = pair(AuditCheck, pb.AuditCheck)
site_event_to_wire, site_event_from_wire = pair(SiteEvent, pb.SiteEvent)
packed_unit_to_wire, packed_unit_from_wire = pair(PackedUnit, common_pb2.PackedUnit)
label_call_to_wire, label_call_from_wire = pair(LabelCall, pb.LabelNodeRequest)
drop_call_to_wire, drop_call_from_wire = pair(DropCall, pb.DropPackedRequest)
trace_to_wire, trace_from_wire = pair(StageTrace, trace_pb2.StageTrace)
measure_request_to_wire, _measure_request_from_wire = pair(MeasureRequest, pb.ProfileRequest)


def site_from_wire(message: pb.GetSiteResponse) -> Site:
    """Raises InvalidArgumentError for figures that cannot be, InternalError for a config that is
    not JSON."""
    try:
        return _site_from_wire(message)
    except InvalidArgumentError as error:
        if error.field != "config_json":
            raise
        raise InternalError(
            f"the coordinator's answer: {error.message}", field=error.field
        ) from None


def measure_request_from_wire(message: pb.ProfileRequest) -> MeasureRequest:
    """Raises InvalidArgumentError naming the field. The data type may be left out if only links are
    measured."""
    if not message.dtype and not message.model:
        message = pb.ProfileRequest.FromString(message.SerializeToString())
        message.dtype = common_pb2.DATA_TYPE_BFLOAT16
    return _measure_request_from_wire(message)


node_progress_to_wire, node_progress_from_wire = pair(NodeProgress, pb.ProfileResponse)


def audit_checks_to_wire(checks: tuple[AuditCheck, ...]) -> pb.AuditChecks:
    return pb.AuditChecks(checks=map(_check_to_wire, checks))


def audit_checks_from_wire(message: pb.AuditChecks) -> tuple[AuditCheck, ...]:
    return tuple(map(_check_from_wire, message.checks))
