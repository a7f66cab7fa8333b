"""The gateway's listener, in the event loop of the process that hosts it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from edgeshard.domain.errors import UnavailableError
from edgeshard.gateway.connections.accepting import ListeningSocket
from edgeshard.gateway.connections.connection import HttpConnection
from edgeshard.gateway.connections.listen import Following, HttpListen
from edgeshard.rpc.tls import join_address, split_address

log = structlog.get_logger()

STOP_LIMIT_S = 1.0
"""The seconds that open streams have for their last words when the process ends."""
BACKLOG = 2048
"""The most connections that wait to be accepted."""


class _Server(uvicorn.Server):
    """A server that leaves signals and the clock to its host: a gateway without requests is not
    woken."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """The listener. `await start()` listens at `url`; `await stop()` ends all that is open."""

    def __init__(self, app: ASGIApp, listen: HttpListen) -> None:
        self.url = ""
        self._app = app
        self._listen = listen
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen at `url`. Raises as `HttpListen.check`, and UnavailableError if the address is
        taken."""
        self._listen.check()
        following = None if self._listen.cert is None else Following(self._listen)
        bound = self._bind()
        config = uvicorn.Config(
            self._app,
            log_config=None,
            # a warning is about a client, and there would be one for each of its requests
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http=cast(type[asyncio.Protocol], partial(HttpConnection, bound)),
            server_header=False,
            date_header=False,  # it would have to be made every second
            proxy_headers=False,
            ssl_context_factory=None if following is None else lambda *_: following.context,
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
        self.url = f"{scheme}://{join_address(self._listen.host or host, port)}"

    async def stop(self) -> None:
        """Stop listening, and end open streams."""
        if self._server is not None and self._serving is not None:
            self._server.ending.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, STOP_LIMIT_S + 0.5)

    def _bind(self) -> ListeningSocket:
        host, port = split_address(self._listen.address, "http-listen")
        try:
            family, kind, number, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            bound = ListeningSocket(family, kind, number)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
            bound.setblocking(False)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {self._listen.address}: {error.strerror}", field="http-listen"
            ) from None
        return bound
