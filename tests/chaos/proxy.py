"""A TCP proxy on loopback that does to a connection what networks do.

`up` is the direction from who dialled to who listens, `down` the other one. Faults are set while
connections run, and hold for those and for new ones of the same link. Everything else passes as it
came.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_READ_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 18
"""The bytes a direction holds before it stops reading, as the buffers of a real link do."""


class Direction:
    """The faults of one direction of every connection, and the data it passed.

    * `delay_s`: until a byte leaves at the other end.
    * `bandwidth_bps`: bytes per second, None if unlimited.
    * `slice_bytes`: the most bytes of one write, each in a segment of its own. 0 is no limit.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bandwidth_bps: float | None = None
        self.slice_bytes = 0
        self.bytes_passed = 0
        self.flips_done = 0
        self._flow = asyncio.Event()
        self._flow.set()
        self._flips: list[tuple[int, int]] = []
        """(number of the byte, bit), counted from the first byte that ever passed."""

    def stall(self) -> None:
        """Nothing passes any more; connections stay open."""
        self._flow.clear()

    def resume(self) -> None:
        self._flow.set()

    def flip(self, after_bytes: int, bit: int = 0) -> None:
        """Change one bit of the byte that follows the next `after_bytes` ones."""
        self._flips.append((self.bytes_passed + after_bytes, bit))

    async def passable(self) -> None:
        await self._flow.wait()

    def passed(self, data: bytes) -> bytes:
        """`data` passes now; return the resulting bytes."""
        begin, end = self.bytes_passed, self.bytes_passed + len(data)
        self.bytes_passed = end
        due = [flip for flip in self._flips if flip[0] < end]
        if not due:
            return data
        changed = bytearray(data)
        for number, bit in due:
            changed[max(number, begin) - begin] ^= 1 << bit
            self.flips_done += 1
        self._flips = [flip for flip in self._flips if flip[0] >= end]
        return bytes(changed)


@dataclass(eq=False)
class Link:
    """All connections of one dialler to the target, those that will be too."""

    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    connections: set[_Connection] = field(default_factory=set)

    def stall(self) -> None:
        """Both directions of every connection stand still, and stay open."""
        self.up.stall()
        self.down.stall()

    def resume(self) -> None:
        self.up.resume()
        self.down.resume()

    def heal(self) -> None:
        """Remove all faults; lost data stays lost."""
        self.resume()
        for direction in (self.up, self.down):
            direction.delay_s = 0.0
            direction.bandwidth_bps = None
            direction.slice_bytes = 0

    def reset(self) -> None:
        """End every connection with RST at both ends."""
        for connection in list(self.connections):
            connection.abort()

    def half_close(self) -> None:
        """Tell the target, on every connection, that nothing more comes. The other direction
        continues."""
        for connection in list(self.connections):
            if connection.far.can_write_eof() and not connection.far.is_closing():
                with contextlib.suppress(OSError, RuntimeError):
                    connection.far.write_eof()


@dataclass(eq=False)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def abort(self) -> None:
        """End both ends with RST."""
        for writer in (self.near, self.far):
            taken: socket.socket | None = writer.get_extra_info("socket")
            if taken is not None:
                with contextlib.suppress(OSError):
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Listens on a free loopback port and forwards to `target`, a host:port that may come and go.

    `dialler` names the process that uses a port of this machine; connections of one name are one
    `Link`. Without it there is one link, ''.
    """

    def __init__(self, target: str, dialler: Callable[[int], Awaitable[str]] | None = None) -> None:
        self.target = target
        self.address = ""
        self.refusing = False
        """New connections are reset at once."""
        self._dialler = dialler
        self._links: dict[str, Link] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; returns the host:port to dial."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def link(self, dialler: str = "") -> Link:
        return self._links.setdefault(dialler, Link())

    def heal(self) -> None:
        """No faults any more on any link."""
        self.refusing = False
        for link in self._links.values():
            link.heal()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link = self.link(
            await self._dialler(writer.get_extra_info("peername")[1]) if self._dialler else ""
        )
        host, _, port = self.target.rpartition(":")
        far: asyncio.StreamWriter | None = None
        if not self.refusing:
            with contextlib.suppress(OSError):
                far_reader, far = await asyncio.open_connection(host, int(port))
        if far is None:
            _Connection(writer, writer).abort()
            return
        connection = _Connection(writer, far)
        link.connections.add(connection)
        for end in (writer, far):
            taken: socket.socket = end.get_extra_info("socket")
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = (_Way(link.up, reader, far), _Way(link.down, far_reader, writer))
        tasks = [asyncio.create_task(way.run()) for way in ways]
        try:
            # Either way may end by itself; the connection is over when both did, or one broke.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            link.connections.discard(connection)
            connection.abort()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Way:
    """One direction of one connection."""

    def __init__(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._held: deque[tuple[float, bytes]] = deque()
        """When bytes come out, and the bytes; empty ones are the end."""
        self._held_bytes = 0
        self._changed = asyncio.Condition()
        self._free_at = 0.0

    async def run(self) -> None:
        """To the end of the direction. Raises OSError when either end broke."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await self._reader.read(_READ_BYTES)
            async with self._changed:
                await self._changed.wait_for(lambda: self._held_bytes < _AHEAD_BYTES)
                now, rate = loop.time(), self._direction.bandwidth_bps
                self._free_at = max(now, self._free_at) + (len(data) / rate if rate else 0.0)
                self._held.append((self._free_at + self._direction.delay_s, data))
                self._held_bytes += len(data)
                self._changed.notify_all()
            if not data:
                return

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._held)
                due, data = self._held.popleft()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._direction.passable()
            if not data:
                if self._writer.can_write_eof() and not self._writer.is_closing():
                    self._writer.write_eof()
                return
            await self._put(self._direction.passed(data))
            async with self._changed:
                self._held_bytes -= len(data)
                self._changed.notify_all()

    async def _put(self, data: bytes) -> None:
        size = self._direction.slice_bytes or len(data)
        for begin in range(0, len(data), size):
            try:
                self._writer.write(data[begin : begin + size])
            except RuntimeError:
                return  # half-closed meanwhile: what still comes this way is lost
            await self._writer.drain()
            if size < len(data):
                await asyncio.sleep(0)  # a turn for the socket, so that this piece leaves by itself
