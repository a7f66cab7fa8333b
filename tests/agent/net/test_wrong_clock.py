"""A node whose clock is outside the certificate of its coordinator, or of another node, names the
clock."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_agent.measuring.probing import probe_link
from edgeshard_agent.net.control import ControlClient

from edgeshard import WIRE_VERSION
from edgeshard.client import Client
from edgeshard.client.upgrades import SiteWheels
from edgeshard.domain.control.commands import Peer, ProfileReport, Registration
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, UnauthenticatedError
from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.identity.authority import Authority, new_key, now, private_pem, request_for
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_files
from tests.agent.net.test_control_reports import FACTS, no_huge_pages

SITE = "mill"
YEAR = timedelta(days=365)
PEER = Principal(SITE, Role.AGENT, "b")


@pytest.fixture
def authority() -> Authority:
    return Authority.create(SITE, now() - YEAR, life=9 * YEAR)


def issued(
    authority: Authority, principal: Principal, directory: Path, offset: timedelta
) -> TlsFiles:
    """Files whose certificate was made `offset` from now."""
    key = new_key()
    certificate = authority.issue(principal, request_for(key), now() + offset)
    return write_files(directory, authority.certificate_pem, certificate, private_pem(key))


@pytest.fixture
async def serve(authority: Authority, tmp_path: Path) -> AsyncIterator[Any]:
    """Starts servers without a service. Such a server has a certificate that this machine's clock
    is outside."""
    servers = []

    async def started(principal: Principal, offset: timedelta) -> str:
        files = issued(authority, principal, tmp_path / principal.id, offset)
        pair = (files.key.read_bytes(), files.cert.read_bytes())
        server = grpc.aio.server()
        credentials = grpc.ssl_server_credentials(
            [pair], files.ca.read_bytes(), require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield started
    for server in servers:
        await server.stop(None)


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> TlsFiles:
    return issued(authority, Principal(SITE, Role.AGENT, "a"), tmp_path / "a", timedelta())


def check_names_the_clock(error: EdgeShardError, address: str) -> None:
    assert isinstance(error, FailedPreconditionError) and (error.reason, error.field) == (
        "CLOCK",
        "clock",
    )
    assert error.message.startswith("this machine's clock shows ")
    assert f"but the certificate of {address} is valid from " in error.message
    assert "timedatectl" in error.message and "renew the certificate" in error.message


def client_of(address: str, tls: TlsFiles) -> ControlClient:
    registration = Registration(
        NodeId("n"), NodeName("a"), "127.0.0.1:1", WIRE_VERSION, FACTS, "i", True
    )
    channel = open_channel(address, tls, "coordinator")
    return ControlClient(
        channel, address, registration, lambda *_: None, tuple, lambda: 0, no_huge_pages
    )


@pytest.mark.parametrize("offset", [timedelta(days=7), -2 * YEAR], ids=["behind", "ahead"])
async def test_an_agent_names_a_clock_outside_the_certificate_of_its_coordinator(
    serve: Any, tls: TlsFiles, offset: timedelta
) -> None:
    """It ends before it has joined, as with any refusal; its measurements are refused in the same
    way."""
    address = await serve(coordinator_of(SITE), offset)
    client = client_of(address, tls)
    with pytest.raises(FailedPreconditionError) as ended:
        await client.run()
    check_names_the_clock(ended.value, address)
    with pytest.raises(FailedPreconditionError) as refused:
        await client.report(ProfileReport(NodeId("id-a")))
    check_names_the_clock(refused.value, address)
    await client.channel.close()


@pytest.mark.parametrize("offset", [timedelta(days=7), -2 * YEAR], ids=["behind", "ahead"])
async def test_the_sdk_names_a_clock_outside_the_certificate_of_the_coordinator(
    authority: Authority, serve: Any, tmp_path: Path, offset: timedelta
) -> None:
    address = await serve(coordinator_of(SITE), offset)
    files = issued(authority, Principal(SITE, Role.OPERATOR, "kim"), tmp_path / "kim", timedelta())
    async with Client(address, tls=files) as client:
        with pytest.raises(FailedPreconditionError) as listed:
            await client.nodes()
        with pytest.raises(FailedPreconditionError) as generated:
            await anext(client.generate("tales", "once"))
        with pytest.raises(FailedPreconditionError) as added:
            await client.add_model(tmp_path)
    for caught in (listed, generated, added):
        check_names_the_clock(caught.value, address)


async def test_a_probe_names_a_clock_outside_the_certificate_of_another_node(
    serve: Any, tls: TlsFiles
) -> None:
    address = await serve(PEER, timedelta(days=7))
    with pytest.raises(FailedPreconditionError) as probed:
        await probe_link(Peer(NodeId("id-b"), NodeName("b"), address), tls)
    check_names_the_clock(probed.value, address)


async def test_a_certificate_of_another_authority_says_nothing_of_the_clock(
    serve: Any, tmp_path: Path
) -> None:
    address = await serve(coordinator_of(SITE), timedelta())
    other = Authority.create(SITE, now(), life=YEAR)
    client = client_of(address, issued(other, PEER, tmp_path / "other", timedelta()))
    with pytest.raises(UnauthenticatedError) as ended:
        await client.run()
    assert ended.value.reason == "TLS_HANDSHAKE"
    await client.channel.close()


def test_an_upgrade_from_the_site_names_the_clock(
    authority: Authority, tls: TlsFiles, tmp_path: Path
) -> None:
    files = issued(authority, coordinator_of(SITE), tmp_path / "coordinator", timedelta(days=7))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        pool.submit(shake_hands, listener, context)
        with pytest.raises(FailedPreconditionError) as caught:
            SiteWheels(address, tls).folder()
        listener.shutdown(socket.SHUT_RDWR)
    check_names_the_clock(caught.value, address)


def shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    """Do the TLS handshake with each caller, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()
