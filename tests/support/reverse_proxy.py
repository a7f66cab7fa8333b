"""A reverse proxy on loopback, as operators put before a gateway: it removes a path's prefix, may
use TLS, and records passed requests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Passed:
    """A request as it was passed on; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(eq=False)
class ReverseProxy:
    """Passes requests under `prefix` on to `target`, a URL, one for each connection. With
    `keeps_host` they have the browser's Host, else the target's, as proxies send by default.
    `origin` is where to dial it."""

    target: str
    prefix: str = ""
    keeps_host: bool = True
    tls: ssl.SSLContext | None = None
    passed: list[Passed] = field(default_factory=list)
    origin: str = ""

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[ReverseProxy]:
        server = await asyncio.start_server(
            self._serve, "127.0.0.1", port, limit=LIMIT, ssl=self.tls
        )
        scheme = "http" if self.tls is None else "https"
        self.origin = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            request, _, lines = (
                (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").partition("\r\n")
            )
            method, path, _ = request.split(" ")
            pairs = (line.partition(": ") for line in lines.strip().split("\r\n"))
            headers = {name.lower(): value for name, _, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            if path == self.prefix or path.startswith((f"{self.prefix}/", f"{self.prefix}?")):
                await self._pass(
                    Passed(method, path.removeprefix(self.prefix) or "/", headers, body),
                    reader,
                    writer,
                )
            else:
                writer.write(
                    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )
                await writer.drain()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            writer.close()

    async def _pass(
        self, request: Passed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.passed.append(request)
        where = urlsplit(self.target)
        own = (
            {"connection": "close"}
            if self.keeps_host
            else {"connection": "close", "host": where.netloc}
        )
        lines = [f"{name}: {value}" for name, value in (request.headers | own).items()]
        back, there = await asyncio.open_connection(where.hostname, where.port)
        there.write(
            "\r\n".join((f"{request.method} {request.path} HTTP/1.1", *lines, "", "")).encode(
                "latin-1"
            )
        )
        there.write(request.body)
        left = asyncio.create_task(reader.read())  # ends when the browser leaves
        answered = asyncio.create_task(_copied(back, writer))
        try:
            await asyncio.wait({left, answered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, answered):
                task.cancel()
            await asyncio.wait({left, answered})
            there.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
