"""The gateway's listener, in the event loop of the process that hosts it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, UnavailableError
from edgeshard.rpc.tls import check_private, is_loopback, join_address, split_address

log = structlog.get_logger()

STOP_LIMIT_S = 1.0
"""Streams that are still open when the process ends have this long to say so."""
MOST_CONNECTIONS = 2048
"""Waiting to be accepted."""


@dataclass(frozen=True, slots=True)
class HttpListen:
    """Where to listen: HOST:PORT, with the PEM files of a certificate beyond loopback."""

    address: str
    cert: Path | None = None
    key: Path | None = None

    @property
    def is_local(self) -> bool:
        return is_loopback(split_address(self.address, "http-listen")[0])

    def check(self) -> None:
        """Raise DeniedError for plaintext beyond loopback and for a key that others can read, InvalidArgumentError for
        files that cannot be used."""
        if self.cert is None and self.key is None:
            if not self.is_local:
                raise DeniedError(
                    f"http-listen {self.address} is beyond loopback and has no TLS: give --http-tls-cert and "
                    "--http-tls-key",
                    field="http-listen",
                    reason="TLS_REQUIRED",
                )
            return
        for name, path in (("http-tls-cert", self.cert), ("http-tls-key", self.key)):
            if path is None:
                raise InvalidArgumentError(
                    f"--{name} is missing: --http-tls-cert and --http-tls-key go together", field=name
                )
        assert self.cert is not None and self.key is not None
        check_private(self.key, "http-tls-key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or "they cannot be read"
            raise InvalidArgumentError(
                f"--http-tls-cert {self.cert} with --http-tls-key {self.key}: {why}",
                field="http-tls-cert",
                reason="TLS_FILE",
            ) from None


class _Server(uvicorn.Server):
    """Signals are the host's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """`await start()` listens at `url`; `await stop()` ends what is open."""

    def __init__(self, app: ASGIApp, listen: HttpListen) -> None:
        self.url = ""
        self._app = app
        self._listen = listen
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises as `HttpListen.check`, and UnavailableError where the address is taken."""
        self._listen.check()
        bound = self._bind()
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            server_header=False,
            proxy_headers=False,
            ssl_certfile=self._listen.cert,
            ssl_keyfile=self._listen.key,
            timeout_graceful_shutdown=int(STOP_LIMIT_S),
            h11_max_incomplete_event_size=64 << 10,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([bound]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise UnavailableError("the gateway did not start", field="http-listen")
            await asyncio.sleep(0)
        host, port = bound.getsockname()[:2]
        scheme = "https" if self._listen.cert is not None else "http"
        self.url = f"{scheme}://{join_address(host, port)}"

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, STOP_LIMIT_S + 0.5)

    def _bind(self) -> socket.socket:
        host, port = split_address(self._listen.address, "http-listen")
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = socket.socket(family, kind, number)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MOST_CONNECTIONS)
            bound.setblocking(False)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {self._listen.address}: {error.strerror}", field="http-listen"
            ) from None
        return bound
