"""The protocols of the listeners: nothing below TLS 1.2, and no weak cipher."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from edgeshard.domain.identity import Role
from edgeshard.rpc.server import EnrolmentServer, Server
from edgeshard.rpc.tls import TlsFiles, split_address
from tests.support.identities import Identities

WEAK = (
    "AES128-SHA",
    "AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES128-SHA",
    "ECDHE-RSA-AES256-SHA384",
    "DHE-RSA-AES128-SHA",
)
"""Without forward secrecy, or with CBC."""


def handshake(address: str, files: TlsFiles, version: ssl.TLSVersion, ciphers: str) -> str:
    """The agreed cipher; raises OSError if there was none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(files.cert, files.key)
    with (
        socket.create_connection(split_address(address), timeout=20) as plain,
        context.wrap_socket(plain) as secure,
    ):
        agreed = secure.cipher()
        assert agreed is not None
        return agreed[0]


@pytest.mark.parametrize("kind", ["members", "joiners"])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_and_weak_ciphers_are_refused(kind: str, tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    files, own = identities.of(Role.AGENT, "a"), identities.coordinator()
    server = (
        Server("127.0.0.1:0", own) if kind == "members" else EnrolmentServer("127.0.0.1:0", own)
    )
    address = await server.start()
    try:
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            with pytest.raises(OSError):
                await asyncio.to_thread(handshake, address, files, version, "ALL")
        for cipher in WEAK:
            with pytest.raises(OSError):
                await asyncio.to_thread(handshake, address, files, ssl.TLSVersion.TLSv1_2, cipher)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            assert "GCM" in await asyncio.to_thread(handshake, address, files, version, "ALL")
    finally:
        await server.stop(0)
