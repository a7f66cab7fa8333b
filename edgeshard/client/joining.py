"""Trading a token for a certificate."""

from __future__ import annotations

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from edgeshard.domain.identity import Enrolment, JoinToken, coordinator_of
from edgeshard.identity.authority import now, request_for
from edgeshard.identity.certificates import bundle_of, check_clock
from edgeshard.proto.v1.identity_pb2_grpc import EnrolmentServiceStub
from edgeshard.wire.identity import enrolment_to_wire, token_from_text, token_to_text
from edgeshard.wire.status import from_rpc_error

__all__ = ["enrol", "token_from_text", "token_to_text"]

TIMEOUT_S = 20.0


async def enrol(token: JoinToken, key: EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    """The certificate of the token's principal for a key, and whom to trust, both in PEM.

    The token says whom to trust: nothing is sent before whoever answers has proved to be the site's coordinator. Only
    a request that the key has signed leaves this machine. Raises FailedPreconditionError for a clock that is wrong,
    DeniedError for a token that is not good, UnavailableError.
    """
    authorities = bundle_of(token.authorities)
    check_clock(authorities, now())
    name = coordinator_of(token.principal.site).dns_name
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.secure_channel(
        token.enrolment, grpc.ssl_channel_credentials(root_certificates=authorities), options
    ) as channel:
        request = enrolment_to_wire(Enrolment(token.token_id, token.secret, request_for(key)))
        try:
            answer = await EnrolmentServiceStub(channel).Enrol(request, timeout=TIMEOUT_S, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"the site at {token.enrolment}") from None
    return answer.certificate, answer.authorities
