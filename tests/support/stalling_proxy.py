"""A TCP forwarder on loopback that can stall, resume and be slow: a network that fails without a
word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

CHUNK_BYTES = 4096


class Way(Enum):
    """A direction, as the one who dials sees it."""

    THERE = "there"
    BACK = "back"


class StallingProxy:
    """Forwards each connection to `target` (host:port), in both directions; dial its `address`.

    While a direction is stalled, connections stay open and new ones are taken, but nothing is
    passed on, not even an end. `bits_per_s` is the speed of each direction, shared by its
    connections; 0 is as fast as the machine.
    """

    def __init__(self, target: str, bits_per_s: float = 0.0) -> None:
        self.aim(target)
        self._bits_per_s = bits_per_s
        self._passing = {way: asyncio.Event() for way in Way}
        self._free_at = dict.fromkeys(Way, 0.0)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.connections = self._stranded = 0
        self.address = ""
        self.resume()

    def aim(self, target: str) -> None:
        """Set the target of connections from now on."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> int:
        """End every connection that there is, without a word of HTTP/2; how many there were."""
        cut = len(self._open)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        return cut

    def stall(self, *ways: Way) -> None:
        """These directions, or both."""
        for way in ways or Way:
            self._passing[way].clear()

    def strand(self) -> None:
        """The connections that there are pass nothing on any more; new ones do."""
        self._stranded = self.connections

    def resume(self) -> None:
        for passing in self._passing.values():
            passing.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StallingProxy]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = "{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections = number = self.connections + 1
        there, back = await asyncio.open_connection(*self._target)
        self._open |= {back, writer}
        for source, sink, way in ((reader, back, Way.THERE), (there, writer, Way.BACK)):
            held: asyncio.Queue[bytes] = asyncio.Queue()
            self._tasks.add(asyncio.create_task(self._take_in(source, held)))
            self._tasks.add(asyncio.create_task(self._pass_on(number, held, sink, way)))

    async def _take_in(self, source: asyncio.StreamReader, held: asyncio.Queue[bytes]) -> None:
        """Read all data, as a network acknowledges data that it loses later; b"" is the end."""
        try:
            while data := await source.read(CHUNK_BYTES if self._bits_per_s else 1 << 16):
                held.put_nowait(data)
        except ConnectionError:
            pass
        finally:
            held.put_nowait(b"")

    async def _pass_on(
        self, number: int, held: asyncio.Queue[bytes], sink: asyncio.StreamWriter, way: Way
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await held.get():
                await self._take_time(len(data), way)
                await self._may_pass(number, way)
                sink.write(data)
                await sink.drain()
        await self._may_pass(number, way)
        self._open.discard(sink)
        sink.close()

    async def _may_pass(self, number: int, way: Way) -> None:
        await self._passing[way].wait()
        if number <= self._stranded:
            await asyncio.Event().wait()

    async def _take_time(self, size_bytes: int, way: Way) -> None:
        if not self._bits_per_s:
            return
        now = asyncio.get_running_loop().time()
        free_at = self._free_at[way] = (
            max(now, self._free_at[way]) + 8 * size_bytes / self._bits_per_s
        )
        await asyncio.sleep(free_at - now)
