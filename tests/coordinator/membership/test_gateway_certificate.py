"""The gateway beyond loopback shows a certificate of the site's own authority."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from edgeshard_coordinator.daemon import _http_listen, _origins, _renewing, _site
from edgeshard_coordinator.membership.membership import GatewayCertificate
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.domain.identity import coordinator_of
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.server import GatewayServer
from edgeshard.identity.authority import Authority, now
from edgeshard.identity.certificates import principal_of
from edgeshard.rpc.tls_files import issue_files, write_private
from tests.support.clients import run
from tests.support.clockwork import Clockwork, Open

pytestmark = pytest.mark.timing


@pytest.fixture
def settings(tmp_path: Path) -> CoordinatorSettings:
    """Settings of a coordinator with its authority, which listens beyond loopback."""
    authority = Authority.create("here", now())
    files = issue_files(authority, coordinator_of("here"), tmp_path / "pki")
    write_private(tmp_path / "ca.key", authority.key_pem)
    return CoordinatorSettings(
        listen="127.0.0.1:0",
        state_dir=tmp_path / "state",
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
        ca_key=tmp_path / "ca.key",
        http_listen="0.0.0.0:8443",
        http_name=("myhost.local", "myhost.lan"),
    )


@pytest_asyncio.fixture
async def server(settings: CoordinatorSettings) -> AsyncIterator[GatewayServer]:
    """As it would listen there, on loopback."""
    listen, _ = _http_listen(settings, _site(settings))
    assert listen is not None and not listen.is_local
    server = GatewayServer(make_app(Clockwork(), Open()), replace(listen, address="127.0.0.1:0"))
    await server.start()
    yield server
    await server.stop()


async def test_clients_that_trust_the_authority_reach_it_by_its_names(
    settings: CoordinatorSettings, server: GatewayServer
) -> None:
    port = server.url.rpartition(":")[2]
    assert server.url == f"https://myhost.local:{port}", "what programs are told"
    for host in (
        "myhost.local",
        "myhost.lan",
        "localhost",
        "127.0.0.1",
        socket.gethostname().partition(".")[0],
    ):
        to = ("--resolve", f"{host}:{port}:127.0.0.1")
        said = await run(
            "curl", "-sS", "--cacert", str(settings.tls_ca), *to, f"https://{host}:{port}/health"
        )
        assert json.loads(said) == {"status": "ok"}
    for options in (
        ("--resolve", f"other.local:{port}:127.0.0.1", "--cacert", str(settings.tls_ca)),
        (),
    ):
        host = "other.local" if options else "127.0.0.1"
        process = await asyncio.create_subprocess_exec(
            "curl", "-s", *options, f"https://{host}:{port}/health"
        )
        assert await process.wait() == 60, (
            "the certificate is of other names, or of nobody that is trusted"
        )


async def test_it_says_of_nobody_at_the_site_who_it_is(settings: CoordinatorSettings) -> None:
    listen, _ = _http_listen(settings, _site(settings))
    assert listen is not None and listen.cert is not None and listen.key is not None
    pem = listen.cert.read_bytes()
    with pytest.raises(InvalidArgumentError) as refused:
        principal_of(pem)
    assert refused.value.reason == "NO_ROLE"
    made = x509.load_pem_x509_certificate(pem)
    uses = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.SERVER_AUTH], "no client can show it"
    assert made.not_valid_after_utc < now() + timedelta(seconds=settings.certificate_life + 1)
    assert listen.key.stat().st_mode & 0o077 == 0


async def test_it_is_renewed_in_place(settings: CoordinatorSettings) -> None:
    short = settings.model_copy(update={"certificate_life": 1.0})
    listen, certificate = _http_listen(short, _site(short))
    assert listen is not None and listen.cert is not None
    first, version = listen.cert.read_bytes(), listen.version()
    (chore,) = _renewing(certificate)
    renewing = asyncio.create_task(chore)
    async with asyncio.timeout(60):
        while listen.cert.read_bytes() == first:
            assert not renewing.done()
            await asyncio.sleep(0.01)
    renewing.cancel()
    assert listen.version() != version, "so the next handshake shows it"
    listen.check()


@pytest.mark.parametrize(
    "name", ["", "a b", "-a", "*.local", "https://myhost.local", "x" * 64, "bücher.local"]
)
def test_a_name_that_is_none_is_refused(settings: CoordinatorSettings, name: str) -> None:
    wrong = settings.model_copy(update={"http_name": (name,)})
    with pytest.raises(InvalidArgumentError, match="--http-name"):
        _http_listen(wrong, _site(wrong))


def test_what_contradicts_is_refused(settings: CoordinatorSettings) -> None:
    def refused(kind: type[Exception], match: str, **changed: object) -> None:
        other = settings.model_copy(update=changed)
        with pytest.raises(kind, match=match):
            _http_listen(other, _site(other))

    refused(InvalidArgumentError, "--http-name", http_listen="127.0.0.1:0")
    refused(
        InvalidArgumentError,
        "--http-name",
        http_tls_cert=settings.tls_cert,
        http_tls_key=settings.tls_key,
    )
    refused(DeniedError, "--ca-key", ca_key=None, http_name=())
    refused(DeniedError, "--http-no-key", http_no_key=True)
    with pytest.raises(DeniedError, match="any web page"):
        _origins(settings.model_copy(update={"http_no_key": True, "http_allow_origin": ("*",)}))


def test_without_names_the_address_that_others_reach_is_shown(
    settings: CoordinatorSettings, tmp_path: Path
) -> None:
    issuing = _site(settings).issuing
    assert issuing is not None
    assert GatewayCertificate(issuing, tmp_path, "192.0.2.7:8443").hosts()[0] == "192.0.2.7"
    assert GatewayCertificate(issuing, tmp_path, "0.0.0.0:8443").hosts()[0] not in ("0.0.0.0", "")
