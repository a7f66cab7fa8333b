"""The service that joiners call, who have no certificate yet."""

from __future__ import annotations

from typing import Any

from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1 import identity_pb2_grpc
from edgeshard.rpc.access import peer_address
from edgeshard.wire.identity import enrolment_from_wire
from edgeshard_coordinator.membership.membership import Membership


class EnrolmentServicer(identity_pb2_grpc.EnrolmentServiceServicer):
    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolResponse:
        certificate, authorities = await self._membership.enrol(enrolment_from_wire(request), peer_address(context))
        return pb.EnrolResponse(certificate=certificate, authorities=authorities)

    async def GetAuthorities(self, request: pb.GetAuthoritiesRequest, context: Any) -> pb.GetAuthoritiesResponse:
        return pb.GetAuthoritiesResponse(authorities=self._membership.authorities())
