"""Tokens, certificates and denials: message <-> value."""

from __future__ import annotations

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import (
    ApiKey,
    DashboardLink,
    Enrolment,
    JoinToken,
    OpenToken,
    Principal,
    TokenRequest,
    WheelServer,
    parse_role,
)
from edgeshard.domain.ids import check_name
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.wire.codec import pair

token_request_to_wire, token_request_from_wire = pair(TokenRequest, pb.CreateTokenRequest)
open_token_to_wire, open_token_from_wire = pair(OpenToken, pb.OpenToken)
enrolment_to_wire, enrolment_from_wire = pair(Enrolment, pb.EnrolRequest)
api_key_to_wire, api_key_from_wire = pair(ApiKey, pb.ApiKey)
dashboard_link_to_wire, dashboard_link_from_wire = pair(DashboardLink, pb.DashboardLink)

wheel_server_to_wire, wheel_server_from_wire = pair(WheelServer, pb.FindWheelsResponse)


def token_to_wire(token: JoinToken) -> pb.JoinToken:
    return pb.JoinToken(
        authorities=token.authorities,
        site=token.principal.site,
        role=token.principal.role,
        id=token.principal.id,
        coordinator=token.coordinator,
        enrolment=token.enrolment,
        token_id=token.token_id,
        secret=token.secret,
        packages=token.packages,
        bootstrap_sha256=token.bootstrap_sha256,
    )


def token_from_wire(message: pb.JoinToken) -> JoinToken:
    """Raises InvalidArgumentError for an incomplete token."""
    principal = Principal(
        check_name(message.site, "site"), parse_role(message.role), check_name(message.id, "id")
    )
    if not message.authorities or not message.secret:
        raise InvalidArgumentError(
            "token: it is incomplete; copy the whole token again", field="token", reason="TOKEN"
        )
    return JoinToken(
        tuple(message.authorities),
        principal,
        message.coordinator,
        message.enrolment,
        message.secret,
        message.packages,
        message.bootstrap_sha256,
    )
