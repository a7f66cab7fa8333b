"""Tokens, certificates and denials: message <-> value."""

from __future__ import annotations

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import (
    ApiKey,
    Denial,
    Enrolment,
    JoinToken,
    Principal,
    TokenRequest,
    parse_role,
    principal_from_uri,
)
from edgeshard.domain.ids import check_id, check_name
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.wire.common import message_of


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
    )


def token_from_wire(message: pb.JoinToken) -> JoinToken:
    """Raises InvalidArgumentError for a token that says too little."""
    principal = Principal(check_name(message.site, "site"), parse_role(message.role), check_name(message.id, "id"))
    if not message.authorities or not message.secret:
        raise InvalidArgumentError("token: it is not whole", field="token", reason="TOKEN")
    return JoinToken(
        tuple(message.authorities),
        principal,
        message.coordinator,
        message.enrolment,
        message.secret,
    )


def token_request_to_wire(request: TokenRequest) -> pb.CreateTokenRequest:
    return message_of(request, pb.CreateTokenRequest)


def token_request_from_wire(message: pb.CreateTokenRequest) -> TokenRequest:
    """Raises InvalidArgumentError naming `role` or `name`."""
    return TokenRequest(parse_role(message.role), check_name(message.id, "name"), message.ttl_s, message.host)


def enrolment_to_wire(enrolment: Enrolment) -> pb.EnrolRequest:
    return pb.EnrolRequest(token_id=enrolment.token_id, secret=enrolment.secret, request=enrolment.request)


def enrolment_from_wire(message: pb.EnrolRequest) -> Enrolment:
    """Raises InvalidArgumentError naming `token`."""
    return Enrolment(check_id(message.token_id, "token"), message.secret, message.request)


def denials_to_wire(denials: tuple[Denial, ...]) -> pb.Denials:
    return pb.Denials(
        denials=[pb.Denial(principal=denial.principal.uri, accepted=denial.accepted) for denial in denials]
    )


def denials_from_wire(message: pb.Denials) -> tuple[Denial, ...]:
    return tuple(Denial(principal_from_uri(item.principal), tuple(item.accepted)) for item in message.denials)


def api_key_to_wire(key: ApiKey) -> pb.ApiKey:
    return message_of(key, pb.ApiKey)


def api_key_from_wire(message: pb.ApiKey) -> ApiKey:
    """Raises InvalidArgumentError as `ApiKey.validate`."""
    key = ApiKey(
        message.name,
        tuple(message.models),
        message.tokens_per_minute if message.HasField("tokens_per_minute") else None,
        message.requests if message.HasField("requests") else None,
        message.key_id,
        message.created_at,
    )
    key.validate()
    return key
