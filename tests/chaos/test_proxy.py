"""The proxy does each fault to real connections, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.proxy import Proxy

DEADLINE_S = 20.0
QUIET_S = 0.1
"""How long nothing may come to count as nothing; too short a wait could only let a fault pass
unseen."""


class Echo:
    """Sends back its input, and records how its connections ended."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = asyncio.Event()
        self.reset = False
        self.keeps_writing = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.pieces.append(data)
                writer.write(data)
                await writer.drain()
            if self.keeps_writing:
                writer.write(b"still here")
                await writer.drain()
        except ConnectionResetError:
            self.reset = True
        self.ended.set()
        writer.close()


class Rig:
    def __init__(
        self, echo: Echo, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.echo = echo
        self.proxy = proxy
        self.reader = reader
        self.writer = writer
        self.link = proxy.link()

    async def back(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), DEADLINE_S)

    async def nothing_comes(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), QUIET_S)
        except TimeoutError:
            return True
        return False


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy = Proxy(f"{host}:{port}")
    near = await proxy.start()
    reader, writer = await asyncio.open_connection(*near.split(":"))
    yield Rig(echo, proxy, reader, writer)
    writer.close()
    await proxy.stop()
    server.close()


async def test_bytes_pass_unchanged_in_both_directions(rig: Rig) -> None:
    data = bytes(range(256)) * 4096
    rig.writer.write(data)
    assert await rig.back(len(data)) == data
    assert rig.link.up.bytes_passed == rig.link.down.bytes_passed == len(data)


async def test_the_end_passes_too(rig: Rig) -> None:
    rig.writer.write(b"last")
    rig.writer.write_eof()
    assert await asyncio.wait_for(rig.reader.read(), DEADLINE_S) == b"last"
    assert not rig.echo.reset


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_stalled_direction_passes_nothing_and_loses_nothing(rig: Rig, way: str) -> None:
    rig.writer.write(b"a")
    await rig.back(1)
    getattr(rig.link, way).stall()
    rig.writer.write(b"b")
    assert await rig.nothing_comes()
    assert rig.echo.pieces == ([b"a"] if way == "up" else [b"a", b"b"])
    assert len(rig.link.connections) == 1 and not rig.echo.ended.is_set()
    rig.link.resume()
    assert await rig.back(1) == b"b"


async def test_what_waits_in_a_stall_is_bounded(rig: Rig) -> None:
    """The sender is held up, as by a full buffer, instead of the proxy's memory filling."""
    rig.link.stall()
    rig.writer.write(bytes(64 << 20))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.writer.drain(), 0.5)
    rig.writer.transport.abort()


async def test_a_reset_is_seen_as_such_at_both_ends(rig: Rig) -> None:
    rig.writer.write(b"a")
    await rig.back(1)
    rig.link.reset()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(rig.reader.read(1), DEADLINE_S)
    await asyncio.wait_for(rig.echo.ended.wait(), DEADLINE_S)
    assert rig.echo.reset


async def test_half_closed_one_way_goes_on_the_other_way(rig: Rig) -> None:
    rig.echo.keeps_writing = True
    rig.writer.write(b"a")
    await rig.back(1)
    rig.link.half_close()
    assert await rig.back(10) == b"still here"
    assert not rig.echo.reset


async def test_a_slow_way_takes_its_time(rig: Rig) -> None:
    clock = asyncio.get_running_loop().time
    rig.link.up.delay_s = 0.15
    began = clock()
    for _ in range(3):  # on their way together, so that only the first one's wait shows
        rig.writer.write(b"a")
    await rig.back(3)
    assert clock() - began >= 0.15
    rig.link.up.delay_s, rig.link.up.bandwidth_bps = 0.0, 100_000.0
    began = clock()
    rig.writer.write(bytes(30_000))
    await rig.back(30_000)
    assert clock() - began >= 0.28


async def test_slices_arrive_as_small_as_they_were_cut(rig: Rig) -> None:
    rig.link.up.slice_bytes = 3
    data = bytes(range(100))
    rig.writer.write(data)
    assert await rig.back(len(data)) == data
    assert len(rig.echo.pieces) > 10, "they came in one piece"


async def test_one_bit_of_the_chosen_byte_changes(rig: Rig) -> None:
    rig.writer.write(b"\0" * 5)
    await rig.back(5)
    rig.link.up.flip(2, bit=3)
    rig.writer.write(b"\0\0")
    assert await rig.back(2) == b"\0\0"
    rig.writer.write(b"\0\0")
    assert await rig.back(2) == b"\x08\0"
    rig.writer.write(b"\0" * 8)
    assert await rig.back(8) == b"\0" * 8
    assert (rig.link.up.flips_done, rig.link.down.flips_done) == (1, 0)


async def test_who_dials_while_nobody_listens_is_reset_and_later_served(rig: Rig) -> None:
    target, rig.proxy.target = rig.proxy.target, "127.0.0.1:9"
    for refusing in (False, True):
        rig.proxy.refusing = refusing
        reader, _ = await asyncio.open_connection(*rig.proxy.address.split(":"))
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), DEADLINE_S)
        rig.proxy.target = target
    rig.proxy.heal()
    reader, writer = await asyncio.open_connection(*rig.proxy.address.split(":"))
    writer.write(b"a")
    assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"a"
    writer.close()


async def test_a_fault_is_of_one_diallers_link_alone() -> None:
    echo, host = Echo(), "127.0.0.1"
    names = iter("ab")

    async def dialler(port: int) -> str:
        return next(names)

    server = await asyncio.start_server(echo.serve, host, 0)
    proxy = Proxy(f"{host}:{server.sockets[0].getsockname()[1]}", dialler)
    port = (await proxy.start()).rpartition(":")[2]
    ends = {}
    for name in "ab":
        reader, writer = ends[name] = await asyncio.open_connection(host, port)
        writer.write(b"1")
        assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"1"
    proxy.link("a").stall()
    for _, writer in ends.values():
        writer.write(b"2")
    assert await asyncio.wait_for(ends["b"][0].readexactly(1), DEADLINE_S) == b"2"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ends["a"][0].read(1), QUIET_S)
    proxy.heal()
    assert await asyncio.wait_for(ends["a"][0].readexactly(1), DEADLINE_S) == b"2"
    for _, writer in ends.values():
        writer.close()
    await proxy.stop()
    server.close()
