"""Specs, placements, deployments and their traffic: message <-> value."""

from __future__ import annotations

from edgeshard.domain.control.site import DeleteCall, DeployCall
from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.replan import ReplanCall, ReplanResult
from edgeshard.domain.deployments.traffic import Traffic
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.codec import pair

placement_to_wire, placement_from_wire = pair(Placement, pb.Placement)
traffic_to_wire, traffic_from_wire = pair(Traffic, pb.Traffic)
spec_to_wire, spec_from_wire = pair(DeploymentSpec, pb.DeploymentSpec)
deployment_to_wire, deployment_from_wire = pair(Deployment, admin_pb2.Deployment)
deploy_call_to_wire, deploy_call_from_wire = pair(DeployCall, admin_pb2.DeployRequest)
delete_call_to_wire, delete_call_from_wire = pair(DeleteCall, admin_pb2.DeleteDeploymentRequest)
replan_call_to_wire, replan_call_from_wire = pair(ReplanCall, admin_pb2.ReplanRequest)
replan_to_wire, replan_from_wire = pair(ReplanResult, admin_pb2.ReplanResponse)
