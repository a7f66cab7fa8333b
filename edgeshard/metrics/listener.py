"""HTTP for Prometheus, in the daemon's own event loop: one path, one method, small requests and few
at once."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

import structlog

from edgeshard.domain.errors import EdgeShardError, UnavailableError
from edgeshard.domain.identity import Role
from edgeshard.identity.certificates import principal_of
from edgeshard.metrics.exposition import Metrics
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.following import FollowingContext
from edgeshard.rpc.tls import TlsFiles, check_secure, join_address, split_address

log = structlog.get_logger()

PATH = "/metrics"
REQUEST_LIMIT_BYTES = 8192
TIME_LIMIT_S = 5.0
"""Time for a request to arrive, and for its answer to leave."""
MOST_AT_ONCE = 8
_READERS = frozenset({Role.CLIENT, Role.OPERATOR})


class MetricsListener:
    """The HTTP listener of `metrics` on `address`, host:port; it does not listen if the address is
    None.

    It is in plaintext on loopback only, else over mutual TLS: then the site's clients and operators
    may read, except the holders of certificates that `denials` refuses.
    """

    def __init__(
        self, address: str | None, tls: TlsFiles | None, metrics: Metrics, denials: Denials
    ) -> None:
        if address is not None:
            check_secure(address, tls, "metrics-listen")
        self._address = address
        self._tls = tls
        self._metrics = metrics
        self._denials = denials
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> str:
        """Listen. Returns the address with its real port, '' if it does not listen; raises
        UnavailableError if it is taken."""
        if self._address is None:
            return ""
        host, port = split_address(self._address, "metrics-listen")
        context = None if self._tls is None else FollowingContext(self._tls).context
        try:
            self._server = await asyncio.start_server(
                self._serve,
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=None if context is None else TIME_LIMIT_S,
                limit=REQUEST_LIMIT_BYTES,
            )
        except OSError as error:
            raise UnavailableError(
                f"--metrics-listen {self._address}: {error.strerror or error}; choose another port",
                field="metrics-listen",
                reason="LISTEN",
            ) from None
        host, port = self._server.sockets[0].getsockname()[:2]
        address = join_address(host, port)
        log.info("metrics_listener_opened", address=address)
        return address

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                status, kind, body = await self._answer(reader, writer)
                head = (
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                )
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, ConnectionError, ssl.SSLError):
            pass  # a reader that is gone, or too slow
        finally:
            self._open -= 1
            writer.close()
            with suppress(ConnectionError, ssl.SSLError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), TIME_LIMIT_S)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, str, bytes]:
        if self._open > MOST_AT_ONCE:
            return _refusal(
                "503 Service Unavailable", "too many scrapes at once; scrape less often"
            )
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            return _refusal("400 Bad Request", "this is not an HTTP request, or too large")
        line, *headers = request.split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if self._tls is not None and (why := self._denied(writer)):
            return _refusal("403 Forbidden", why)
        if path != PATH:
            return _refusal("404 Not Found", f"this address serves only {PATH}")
        if method != "GET":
            return _refusal("405 Method Not Allowed", f"{PATH} takes GET")
        accept = next(
            (
                value
                for key, _, value in (h.partition(":") for h in headers)
                if key.lower() == "accept"
            ),
            "",
        )
        try:
            text, kind = await self._metrics.exposed(accept)
        except Exception:
            log.exception("metrics_failed")
            return _refusal(
                "500 Internal Server Error", "the metrics cannot be read now; see the daemon's log"
            )
        return "200 OK", kind, text

    def _denied(self, writer: asyncio.StreamWriter) -> str:
        """The reason why the holder of the certificate may not read; '' if it may."""
        pem = ssl.DER_cert_to_PEM_cert(
            writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        ).encode()
        try:
            principal = principal_of(pem)
            if principal.role not in _READERS:
                return f"{principal} may not read metrics: a client or an operator may"
            self._denials.check_certificate(principal, lambda: pem)
        except EdgeShardError as error:
            return error.message
        return ""


def _refusal(status: str, why: str) -> tuple[str, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{why}\n".encode()
