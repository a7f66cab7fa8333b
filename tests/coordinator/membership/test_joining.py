"""Joining by a token, with a coordinator's real process: admissions and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from edgeshard.client.joining import enrol, invitation_from_text, invitation_to_text
from edgeshard.domain.errors import DeniedError, EdgeShardError, FailedPreconditionError
from edgeshard.domain.identity import (
    Enrolment,
    JoinToken,
    Principal,
    Role,
    authority_digest,
    coordinator_of,
)
from edgeshard.identity import authority
from edgeshard.identity.authority import Authority, new_key, private_pem
from edgeshard.identity.certificates import ders_of, principal_of, serial_of, validity_of
from edgeshard.proto.v1 import admin_pb2, identity_pb2, identity_pb2_grpc
from edgeshard.rpc.renewal import renew_now
from edgeshard.rpc.tls_files import write_files
from edgeshard.wire.identity import enrolment_to_wire
from tests.support.membership import SecureSite, joined

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureSite]:
    async with SecureSite(tmp_path_factory.mktemp("mill")) as site:
        yield site


async def test_who_joined_is_who_the_token_says(mill: SecureSite) -> None:
    files = await joined(mill, Role.OPERATOR, "kim")
    assert principal_of(files.cert.read_bytes()) == Principal("mill", Role.OPERATOR, "kim")
    async with mill.client_with(files) as client:
        assert await client.nodes() == ()


async def test_a_token_is_for_one_process(mill: SecureSite) -> None:
    """A later holder gets nothing; the process itself may repeat its request, if the answer was
    lost."""
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    invitation = invitation_from_text(invitation_to_text(token.invitation))
    key = new_key()
    await enrol(invitation, key)
    await enrol(invitation, key)
    with pytest.raises(DeniedError) as refusal:
        await enrol(invitation, new_key())
    assert refusal.value.reason == "TOKEN_USED"


async def test_made_up_tokens_are_refused(mill: SecureSite) -> None:
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    with pytest.raises(DeniedError) as refusal:
        await enrol(replace(token.invitation, secret=b"x" * 16), new_key())
    assert refusal.value.reason == "TOKEN"
    async with entrance(mill, token) as channel:
        request = enrolment_to_wire(
            Enrolment(token.token_id, b"x" * 16, authority.request_for(new_key()))
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await identity_pb2_grpc.EnrolmentServiceStub(channel).Enrol(request, timeout=20)
    assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_role_cannot_be_asked_for(mill: SecureSite) -> None:
    """A joiner's own claims are ignored: only the key in its request counts."""
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.CLIENT, "app")
    key = new_key()
    certificate, _ = await enrol(
        replace(token.invitation, principal=Principal("mill", Role.OPERATOR, "admin")), key
    )
    assert principal_of(certificate) == Principal("mill", Role.CLIENT, "app")


async def test_nobody_is_told_a_secret_before_it_proved_to_be_the_site(
    mill: SecureSite, tmp_path: Path
) -> None:
    """A listener at the address with a certificate of another authority learns nothing."""
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    other = Authority.create("mill", authority.now())
    (certificate,) = ders_of(other.certificate_pem)
    with pytest.raises(DeniedError) as refusal:
        await enrol(replace(token.invitation, authority=authority_digest(certificate)), new_key())
    assert refusal.value.reason == "OTHER_AUTHORITY"
    await enrol(token.invitation, new_key())  # it was not used up


class Stranger(identity_pb2_grpc.EnrolmentServiceServicer):
    """A server that answers instead of the coordinator. The site's authority is no secret: it sends
    the same as the site would.
    """

    def __init__(self, trusted: bytes) -> None:
        self._trusted = trusted
        self.told: list[Any] = []

    async def GetAuthorities(
        self, request: Any, context: Any
    ) -> identity_pb2.GetAuthoritiesResponse:
        return identity_pb2.GetAuthoritiesResponse(authorities=ders_of(self._trusted))

    async def Enrol(self, request: Any, context: Any) -> identity_pb2.EnrolResponse:
        self.told.append(request)
        return identity_pb2.EnrolResponse()


@pytest.mark.parametrize("shows", ["a certificate of its own", "a member's certificate"])
async def test_a_stranger_who_knows_the_authority_hears_no_secret(
    mill: SecureSite, tmp_path: Path, shows: str
) -> None:
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    stranger = Stranger(mill.identities.authority.certificate_pem)
    server = grpc.aio.server()
    key = new_key()
    issuer, principal = Authority.create("mill", authority.now()), coordinator_of("mill")
    if shows == "a member's certificate":
        issuer = mill.identities.authority
        principal = Principal("mill", Role.AGENT, "coordinator.coordinator.mill")
    certificate = issuer.issue(principal, authority.request_for(key), authority.now())
    identity_pb2_grpc.add_EnrolmentServiceServicer_to_server(stranger, server)
    credentials = grpc.ssl_server_credentials([(private_pem(key), certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        with pytest.raises(EdgeShardError):
            await enrol(replace(token.invitation, enrolment=f"127.0.0.1:{port}"), new_key())
    finally:
        await server.stop(0)
    assert stranger.told == []


async def test_a_coordinator_of_another_name_is_no_coordinator(mill: SecureSite) -> None:
    """A member of the site cannot take joiners in: it has no certificate of the coordinator's
    name."""
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    with pytest.raises(EdgeShardError):
        await enrol(
            replace(token.invitation, principal=replace(token.principal, site="other")), new_key()
        )


async def test_the_listener_for_joiners_serves_nothing_else(mill: SecureSite) -> None:
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    for path, request in [
        ("/edgeshard.proto.v1.AdminService/ListNodes", admin_pb2.ListNodesRequest()),
        ("/edgeshard.proto.v1.IdentityService/Renew", identity_pb2.RenewRequest()),
        ("/grpc.health.v1.Health/Check", admin_pb2.ListNodesRequest()),
    ]:
        async with entrance(mill, token) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary(path, request_serializer=type(request).SerializeToString)(
                    request, timeout=20
                )
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


def entrance(mill: SecureSite, token: JoinToken) -> grpc.aio.Channel:
    """A channel to the listener for joiners, without a certificate."""
    trusted = grpc.ssl_channel_credentials(mill.identities.authority.certificate_pem)
    options = [("grpc.ssl_target_name_override", "coordinator.coordinator.mill")]
    return grpc.aio.secure_channel(token.enrolment, trusted, options)


@pytest.mark.parametrize(
    "request_pem", [b"", b"x" * 5000, b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"]
)
async def test_what_is_no_request_uses_no_token_up(mill: SecureSite, request_pem: bytes) -> None:
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    async with entrance(mill, token) as channel:
        stub = identity_pb2_grpc.EnrolmentServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Enrol(
                identity_pb2.EnrolRequest(
                    token_id=token.token_id, secret=token.secret, request=request_pem
                ),
                timeout=20,
            )
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await enrol(token.invitation, new_key())


@pytest.mark.parametrize(("role", "name"), [(Role.AGENT, "b"), (Role.CLIENT, "app")])
async def test_only_operators_let_in_and_put_out(mill: SecureSite, role: Role, name: str) -> None:
    async with mill.client_of(role, name) as client:
        for call in (
            client.create_token(Role.OPERATOR, "me"),
            client.open_tokens(),
            client.revoke_token("0" * 16),
            client.revoke(Role.AGENT, "a"),
            client.remove_node("a"),
        ):
            with pytest.raises(DeniedError):
                await call


async def test_a_certificate_is_renewed_for_its_own_principal(mill: SecureSite) -> None:
    files = await joined(mill, Role.CLIENT, "app")
    before = files.cert.read_bytes()
    async with mill.client_with(files) as client:
        await renew_now(files, client._connection.renewal())
        after = files.cert.read_bytes()
        assert serial_of(after) != serial_of(before) and principal_of(after) == principal_of(before)
        assert await client.served_models() == ()


async def test_what_was_revoked_is_refused_and_may_join_again(mill: SecureSite) -> None:
    """Also its renewal. An unseen certificate that was made by hand is refused like the others."""
    files, by_hand = await joined(mill, Role.CLIENT, "eve"), mill.identities.of(Role.CLIENT, "eve")
    async with (
        mill.client_of() as admin,
        mill.client_with(files) as eve,
        mill.client_with(by_hand) as twin,
    ):
        await eve.served_models()
        await twin.served_models()
        token = await admin.create_token(Role.CLIENT, "eve")
        await admin.revoke(Role.CLIENT, "eve")
        for call in (
            eve.served_models(),
            twin.served_models(),
            renew_now(files, eve._connection.renewal()),
        ):
            with pytest.raises(DeniedError) as refusal:
                await call
            assert refusal.value.reason == "REVOKED"
        with pytest.raises(DeniedError):
            await enrol(token.invitation, new_key())  # made before
    again = await joined(mill, Role.CLIENT, "eve")
    async with mill.client_with(again) as eve, mill.client_with(by_hand) as twin:
        await eve.served_models()
        await renew_now(again, eve._connection.renewal())
        with pytest.raises(DeniedError):
            await twin.served_models()
    async with mill.client_with(again) as eve:
        await eve.served_models()


async def test_what_was_revoked_stays_so_over_a_restart(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as site:
        files = await joined(site, Role.CLIENT, "eve")
        async with site.client_of() as admin:
            pending = await admin.create_token(Role.CLIENT, "app")
            await admin.revoke(Role.CLIENT, "eve")
        await site.coordinator.kill()
        await site.start()
        async with site.client_with(files) as eve:
            with pytest.raises(DeniedError):
                await eve.served_models()
        secrets_on_disk = b"".join(
            path.read_bytes() for path in (tmp_path / "coordinator").glob("membership*")
        )
        assert (
            pending.token_id.encode() in secrets_on_disk and pending.secret not in secrets_on_disk
        )
        assert pending.secret.hex().encode() not in secrets_on_disk


async def test_expired_certificates_are_refused(mill: SecureSite) -> None:
    """By the server; a client that notices it fails by itself."""
    principal, key = Principal("mill", Role.OPERATOR, "late"), new_key()
    long_ago = authority.now() - timedelta(days=2)
    certificate = mill.identities.authority.issue(
        principal, authority.request_for(key), long_ago, timedelta(days=1)
    )
    pem = mill.identities.authority.certificate_pem
    files = write_files(mill.directory / "late", pem, certificate, private_pem(key))
    with pytest.raises(FailedPreconditionError) as refusal:
        async with mill.client_with(files):
            pass
    assert refusal.value.reason == "EXPIRED" and "edgectl token create" in refusal.value.message
    assert "this machine's clock shows" in refusal.value.message
    credentials = grpc.ssl_channel_credentials(pem, private_pem(key), certificate)
    options = [("grpc.ssl_target_name_override", "coordinator.coordinator.mill")]
    async with grpc.aio.secure_channel(mill.coordinator.address, credentials, options) as channel:
        call: Any = channel.unary_unary("/edgeshard.proto.v1.AdminService/ListNodes")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(b"", timeout=20)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_two_authorities_are_trusted_while_one_takes_over(tmp_path: Path) -> None:
    """A coordinator that trusts both admits certificates of both. It issues with the authority
    whose key it has, and sends the bundle to processes that join or renew."""
    async with SecureSite(tmp_path) as site:
        old, new = site.identities.authority, Authority.create("mill", authority.now())
        files = await joined(site, Role.CLIENT, "app")
        await site.coordinator.stop()
        bundle = new.certificate_pem + old.certificate_pem
        site.identities.coordinator().ca.write_bytes(bundle)
        (tmp_path / "ca.key").write_bytes(new.key_pem)
        await site.start()
        async with site.client_with(files) as app:
            await app.served_models()
            await renew_now(files, app._connection.renewal())
            assert files.ca.read_bytes() == bundle
        async with site.client_with(files) as app:  # with its new certificate
            await app.served_models()
        newcomer = await joined(site, Role.CLIENT, "other")
        assert newcomer.ca.read_bytes() == bundle
        async with site.client_of() as admin:
            token = await admin.create_token(Role.CLIENT, "last")
        assert token.authorities == ders_of(old.certificate_pem + new.certificate_pem), (
            "first who signed what it shows"
        )


async def test_a_site_without_the_authoritys_key_makes_no_certificates(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as site:
        await site.coordinator.stop()
        command = site.coordinator._command
        for option in ("--ca-key", "--enrol-listen"):
            at = command.index(option)
            del command[at : at + 2]
        await site.start()
        async with site.client_of() as admin:
            for call in (admin.create_token(Role.AGENT, "b"), renewal_of(admin)):
                with pytest.raises(FailedPreconditionError):
                    await call
            await admin.revoke(Role.CLIENT, "app")


async def renewal_of(client: object) -> None:
    await client._connection.renewal()(authority.request_for(new_key()))  # type: ignore[attr-defined]


async def test_a_clock_before_the_authority_has_an_error_of_its_own(
    mill: SecureSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mill.client_of() as admin:
        token = await admin.create_token(Role.AGENT, "b")
    early = authority.now() - timedelta(days=20_000)
    monkeypatch.setattr("edgeshard.client.joining.now", lambda: early)
    with pytest.raises(FailedPreconditionError) as refusal:
        await enrol(token.invitation, new_key())
    assert refusal.value.reason == "CLOCK" and "set the clock" in refusal.value.message


async def test_a_certificate_lives_as_long_as_it_is_set(tmp_path: Path) -> None:
    async with SecureSite(tmp_path, "--certificate-life", "2h") as site:
        files = await joined(site, Role.CLIENT, "app")
    validity = validity_of(files.cert.read_bytes())
    assert validity.ends - validity.begins == timedelta(hours=2)
    assert validity.ends - validity.renewal == timedelta(hours=2) / 3
