"""The metrics listener: one path, small requests, plaintext only on loopback, and over TLS only for
the site's own certificates.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edgeshard.domain.errors import DeniedError, UnavailableError
from edgeshard.domain.identity import Denial, Role
from edgeshard.metrics.exposition import Metrics
from edgeshard.metrics.families import counter
from edgeshard.metrics.listener import MetricsListener
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.tls import TlsFiles, split_address
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

COUNTED = Metrics(lambda: [counter("edgeshard_things", "Things.", ("kind",), [(("good",), 3)])])


@asynccontextmanager
async def listening(
    tls: TlsFiles | None = None, denials: Denials | None = None, metrics: Metrics = COUNTED
) -> AsyncIterator[str]:
    listener = MetricsListener("127.0.0.1:0", tls, metrics, denials or Denials())
    try:
        yield await listener.start()
    finally:
        await listener.stop()


async def asked(
    address: str, request: bytes, context: ssl.SSLContext | None = None, name: str | None = None
) -> str:
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer.decode()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: here", *headers, "", ""]).encode()


async def test_a_scrape_gets_what_is_counted_in_the_format_it_asks_for() -> None:
    async with listening() as address:
        plain = await asked(address, get("/metrics"))
        open_metrics = await asked(
            address, get("/metrics?x=1", "Accept: application/openmetrics-text; version=1.0.0")
        )
    assert plain.startswith("HTTP/1.1 200 OK\r\nContent-Type: text/plain")
    assert (
        'edgeshard_things_total{kind="good"} 3.0' in plain
        and "process_resident_memory_bytes" in plain
    )
    assert "application/openmetrics-text" in open_metrics and open_metrics.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/"), "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", "400"),
    ],
)
async def test_anything_else_is_refused(request_bytes: bytes, status: str) -> None:
    async with listening() as address:
        assert f"HTTP/1.1 {status} " in await asked(address, request_bytes)


@pytest.mark.parametrize("version", ["abc", "", "9" * 5000, "1.0.x", "-1", "\xb2"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_a_version_that_is_none_gets_a_format_all_the_same(
    kind: str, version: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with listening() as address:
        request = f"GET /metrics HTTP/1.1\r\nAccept: {kind};version={version}\r\n\r\n".encode(
            "latin-1"
        )
        assert (await asked(address, request)).startswith("HTTP/1.1 200 OK")
    assert "metrics_failed" not in capfd.readouterr().err


async def test_metrics_that_cannot_be_read_are_an_answer_too(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken() -> list[object]:
        raise ValueError("broken")

    async with listening(metrics=Metrics(broken)) as address:  # type: ignore[arg-type]
        assert "HTTP/1.1 500 " in await asked(address, get("/metrics"))
        assert "HTTP/1.1 500 " in await asked(address, get("/metrics")), "it still listens"


async def test_beyond_loopback_there_is_no_plaintext() -> None:
    with pytest.raises(DeniedError) as refusal:
        MetricsListener("0.0.0.0:9100", None, COUNTED, Denials())
    assert refusal.value.field == "metrics-listen"


async def test_a_port_that_is_taken_is_named() -> None:
    async with listening() as address:
        with pytest.raises(UnavailableError) as refusal:
            await MetricsListener(address, None, COUNTED, Denials()).start()
    assert address in refusal.value.message


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    return context


SERVER_NAME = "coordinator.coordinator.site"


async def test_over_tls_clients_and_operators_read_and_nobody_else(identities: Identities) -> None:
    denials = Denials()
    revoked = identities.of(Role.CLIENT, "revoked")
    denials.replace([Denial(revoked.principal())])
    async with listening(identities.coordinator(), denials) as address:

        async def status(files: TlsFiles) -> str:
            answer = await asked(address, get("/metrics"), client_context(files), SERVER_NAME)
            return answer.split(" ")[1]

        assert await status(identities.of(Role.CLIENT, "prometheus")) == "200"
        assert await status(identities.of(Role.OPERATOR, "admin")) == "200"
        assert await status(identities.of(Role.AGENT, "a")) == "403"
        assert await status(revoked) == "403"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asked_strictly(
                address, ssl.create_default_context(cafile=identities.coordinator().ca)
            )


async def asked_strictly(address: str, context: ssl.SSLContext) -> None:
    """As `asked`, but a stream without an answer raises."""
    if not await asked(address, get("/metrics"), context, SERVER_NAME):
        raise ConnectionResetError


async def test_a_renewed_certificate_is_shown_at_the_next_handshake(
    identities: Identities, tmp_path: Path
) -> None:
    own, other = identities.coordinator(), identities.of(Role.AGENT, "renewed")
    copies = TlsFiles(own.ca, tmp_path / "cert.pem", tmp_path / "key.pem")

    def lay(files: TlsFiles) -> None:
        copies.cert.write_bytes(files.cert.read_bytes())
        copies.key.write_bytes(files.key.read_bytes())
        copies.key.chmod(0o600)

    lay(own)
    context = client_context(identities.of(Role.CLIENT, "prometheus"))
    async with listening(copies) as address:
        assert " 200 " in await asked(address, get("/metrics"), context, SERVER_NAME)
        lay(other)
        assert " 200 " in await asked(address, get("/metrics"), context, "renewed.agent.site")


async def test_tls_has_forward_secrecy_and_is_not_old(identities: Identities) -> None:
    context = client_context(identities.of(Role.CLIENT, "prometheus"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(identities.coordinator()) as address:
        host, port = split_address(address)
        _, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=SERVER_NAME
        )
        name, version, _ = writer.get_extra_info("ssl_object").cipher()
        writer.close()
        context.set_ciphers("AES128-GCM-SHA256")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, port, ssl=context, server_hostname=SERVER_NAME)
    assert name.startswith("ECDHE-") and version == "TLSv1.2"
