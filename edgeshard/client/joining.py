"""Trading a token for a certificate."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from edgeshard.domain.errors import DeniedError, UnavailableError
from edgeshard.domain.identity import Enrolment, Invitation, authority_digest, coordinator_of
from edgeshard.identity.authority import now, request_for
from edgeshard.identity.certificates import bundle_of, check_clock, check_valid_now
from edgeshard.process.extras import check_extras
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1.identity_pb2_grpc import EnrolmentServiceStub
from edgeshard.rpc.discovery import found
from edgeshard.rpc.tls import split_address
from edgeshard.wire.identity import enrolment_to_wire
from edgeshard.wire.invitations import (
    invitation_from_text,
    invitation_to_text,
    line_without_edgeshard,
)
from edgeshard.wire.status import from_rpc_error

__all__ = [
    "enrol",
    "invitation_from_text",
    "invitation_to_text",
    "line_without_edgeshard",
    "located",
]

TIMEOUT_S = 20.0
DISCOVERY_S = 10.0
"""How long to wait for a site's announcement: it is repeated on request, which takes a second."""


async def enrol(invitation: Invitation, key: EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    """The certificate of the invitation's principal for a key, and whom to trust, both in PEM.

    The invitation identifies the site: its secret is not sent before the server has proved to be
    the site's coordinator. Only a request that the key has signed leaves this machine. Raises
    FailedPreconditionError if the clock is wrong, DeniedError if the token is invalid or the site
    is not the token's, UnavailableError.
    """
    authority = await _authority(invitation)
    check_clock(authority, now())
    async with _channel(invitation, authority) as channel:
        request = enrolment_to_wire(
            Enrolment(invitation.token_id, invitation.secret, request_for(key))
        )
        try:
            answer = await EnrolmentServiceStub(channel).Enrol(
                request, timeout=TIMEOUT_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"the site at {invitation.enrolment}") from None
    return answer.certificate, answer.authorities


async def located(invitation: Invitation, timeout_s: float = DISCOVERY_S) -> Invitation:
    """The invitation with its site's addresses. If it has none, they are searched on this machine's
    networks.

    A server that announces the site is trusted only after proving to have a certificate of the
    authority that the invitation names. All such servers are queried at the same time. Raises
    FailedPreconditionError without the discovery extra, UnavailableError if no server has proved it
    in `timeout_s` seconds.
    """
    if invitation.has_address:
        return invitation
    check_extras("a token without an address", "discovery")
    attempts: set[asyncio.Task[Invitation]] = set()
    proven: asyncio.Future[Invitation] = asyncio.get_running_loop().create_future()

    def heard(task: asyncio.Task[Invitation]) -> None:
        if not task.cancelled() and task.exception() is None and not proven.done():
            proven.set_result(task.result())

    async def look() -> None:
        async with aclosing(found(invitation.authority)) as places:
            async for coordinator, enrolment in places:
                attempts.add(
                    task := asyncio.ensure_future(_proven(invitation, coordinator, enrolment))
                )
                task.add_done_callback(heard)

    looking = asyncio.ensure_future(look())
    try:
        first: set[asyncio.Future[Any]] = {looking, proven}
        await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not proven.done() and looking.done() and looking.exception() is None:
            # as many as there are addresses to check
            await asyncio.wait({proven}, timeout=timeout_s)
        if proven.done():
            return proven.result()
    finally:
        for task in (looking, *attempts):
            task.cancel()
        await asyncio.gather(looking, *attempts, return_exceptions=True)
    others = f"; {len(attempts)} that claim to be it are not" if attempts else ""
    raise UnavailableError(
        f"site {invitation.principal.site} does not answer on this machine's networks{others}: its "
        "coordinator needs --announce and must be on the same network; or use a token with an "
        "address",
        field="token",
    )


async def _proven(invitation: Invitation, coordinator: str, enrolment: str) -> Invitation:
    """The invitation with these addresses. Raises EdgeShardError unless the site of its authority
    is there."""
    there = replace(invitation, coordinator=coordinator, enrolment=enrolment)
    await _authority(there)
    return there


async def _authority(invitation: Invitation) -> bytes:
    """The certificate in PEM that the invitation has the digest of.

    Any machine may answer, so only what the digest proves is trusted, and no secret is sent. Raises
    FailedPreconditionError if the clock is outside the validity of the certificate.
    """
    where = f"the site at {invitation.enrolment}"
    address = split_address(invitation.enrolment)
    try:
        server_certificate = await asyncio.to_thread(
            ssl.get_server_certificate, address, timeout=TIMEOUT_S
        )
    except (OSError, UnicodeError) as error:  # also of TLS; a name that no host has
        raise UnavailableError(f"{where} cannot be reached: {error}", field="token") from None
    check_valid_now(server_certificate.encode(), f"the certificate of {where}", now())
    async with _channel(invitation, server_certificate.encode()) as channel:
        try:
            answer = await EnrolmentServiceStub(channel).GetAuthorities(
                pb.GetAuthoritiesRequest(), timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, where) from None
    for certificate in answer.authorities:
        if authority_digest(certificate) == invitation.authority:
            return bundle_of([certificate])
    raise DeniedError(
        f"{where} is not the site of the token: get another token from its operator, and find out "
        "who answers there",
        field="token",
        reason="OTHER_AUTHORITY",
    )


def _channel(invitation: Invitation, trusted: bytes) -> grpc.aio.Channel:
    """A channel to a server with a certificate of the site's coordinator, signed by an authority in
    `trusted`, in PEM."""
    name = coordinator_of(invitation.principal.site).dns_name
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
    credentials = grpc.ssl_channel_credentials(root_certificates=trusted)
    return grpc.aio.secure_channel(invitation.enrolment, credentials, options)
