"""HTTP/1.1 as a test speaks it: whole answers, streams, and leaving in the middle of one."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

PATIENCE_S = 60.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The content of an error of OpenAI's form."""
        error: dict[str, Any] = self.json["error"]
        return error


class Http:
    """Sends requests to the gateway at `url`, with `key` if there is one; over TLS with the trust
    of `tls`."""

    def __init__(self, url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self.key = key
        self.tls = tls

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.send("GET", path, None, headers)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.send("POST", path, body, headers)

    async def send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Answer:
        async with asyncio.timeout(PATIENCE_S), self.opened(method, path, body, headers) as stream:
            parts = [part async for part in stream.parts()]
            return Answer(stream.status, stream.headers, b"".join(parts))

    async def events(self, path: str, body: Any) -> list[Any]:
        """The `data:` of a stream's events, in JSON; the last must be [DONE], and is left out."""
        answer = await self.post(path, body)
        assert answer.status == 200, answer.body
        lines = [line for line in answer.body.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        holds: int = 65536,
    ) -> AsyncIterator[Stream]:
        """An answer whose headers are there. Leaving closes the connection. Unread data fills about
        `holds` bytes on this side; then the other side waits."""
        where = urlsplit(self.url)
        dialled = socket.socket()
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, holds)
        dialled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(dialled, (where.hostname, where.port))
        name = None if self.tls is None else where.hostname
        reader, writer = await asyncio.open_connection(
            sock=dialled, limit=holds, ssl=self.tls, server_hostname=name
        )
        try:
            stream = Stream(reader, writer)
            await stream.ask(method, path, self._headers(headers), body)
            yield stream
        finally:
            writer.close()

    def _headers(self, more: Mapping[str, str] | None) -> dict[str, str]:
        shown = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {
            "host": urlsplit(self.url).netloc,
            "content-type": "application/json",
            **shown,
            **(more or {}),
        }


class Stream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def is_reset(self) -> bool:
        """Whether the other side has broken the connection, also if nothing of its answer was
        read."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        return (
            bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            or self._reader.exception() is not None
        )

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> None:
        """Send a request, and wait for the beginning of its answer."""
        await self.say(method, path, headers, body)
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        assert isinstance(event, h11.Response), event
        self.status = event.status_code
        self.headers = {name.decode(): value.decode() for name, value in event.headers}

    async def say(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> None:
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        all_headers = [*headers.items(), ("content-length", str(len(data)))]
        request = h11.Request(method=method, target=path, headers=all_headers)
        for event in (request, h11.Data(data=data), h11.EndOfMessage()):
            self._writer.write(self._connection.send(event) or b"")
        await self._writer.drain()

    async def parts(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        assert isinstance(event, h11.EndOfMessage), event

    async def _next(self) -> Any:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(65536))
        return event
