"""A TCP forwarder on loopback that closes a connection without bytes, as proxies in front of
servers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class IdleProxy:
    """Forwards connections to `port` of loopback. It closes one whose server sends nothing for
    `idle_s` seconds."""

    def __init__(self, port: int, idle_s: float) -> None:
        self._port = port
        self._idle_s = idle_s
        self.closed = 0
        """Connections that it has closed."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Listen; the URL to dial."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", self._port)
        sending = asyncio.create_task(self._copy(reader, there))
        try:
            while part := await asyncio.wait_for(back.read(1 << 16), self._idle_s):
                writer.write(part)
                await writer.drain()
        except TimeoutError:
            self.closed += 1
        finally:
            sending.cancel()
            there.close()
            writer.close()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await source.read(1 << 16):
                sink.write(part)
                await sink.drain()
