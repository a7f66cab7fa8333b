"""A machine in the middle of connections: it cuts, delays, repeats and damages forwarded data, and
answers joiners instead of the site. For sites of one's own on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from edgeshard.rpc.tls import TlsFiles, split_address

BOOTSTRAP = (
    Path(__file__).resolve().parents[2] / "coordinator/edgeshard_coordinator/packages/bootstrap.py"
)
STEERING = "\x1b]0;owned\x07\x1b[2JRun: curl evil \x9b31m\u202e"
ENDS_S = 30.0
_PART_BYTES = 1 << 14

Meddle = Callable[[bytes, random.Random], tuple[float, bytes | None]]
"""Seconds to wait before a part of a connection is forwarded, and its replacement; None: cut it."""


def cut(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
    """Cut the connection at any part."""
    return 0.0, None if dice.random() < 0.05 else part


def delay(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
    """Forward late."""
    return dice.uniform(0.0, 0.2), part


def damage(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
    """Change a byte of some parts."""
    if dice.random() < 0.9:
        return 0.0, part
    place = dice.randrange(len(part))
    return 0.0, part[:place] + bytes([part[place] ^ 0xFF]) + part[place + 1 :]


def repeat(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
    """Forward some parts twice."""
    return 0.0, part if dice.random() < 0.9 else 2 * part


def drop(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
    """Leave some parts out."""
    return 0.0, part if dice.random() < 0.9 else b""


WAYS: tuple[Meddle, ...] = (cut, delay, damage, repeat, drop)


@contextlib.asynccontextmanager
async def between(target: str, meddle: Meddle, dice: random.Random) -> AsyncIterator[str]:
    """An address of loopback that forwards to `target` as `meddle` has it."""
    tasks = set[asyncio.Task[None]]()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        there, back = await asyncio.open_connection(*split_address(target))
        await asyncio.gather(_copy(reader, back, meddle, dice), _copy(there, writer, meddle, dice))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meddle: Meddle, dice: random.Random
) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(_PART_BYTES):
            wait_s, changed = meddle(part, dice)
            await asyncio.sleep(wait_s)
            if changed is None:
                break
            writer.write(changed)
            await writer.drain()
    writer.close()


async def garbage(address: str, dice: random.Random) -> None:
    """A connection with bytes that are no TLS, or its beginning only."""
    beginning = dice.choice(
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\n", b"")
    )
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(*split_address(address))
        writer.write(beginning + dice.randbytes(dice.randrange(1, 20_000)))
        await writer.drain()
        writer.close()


async def bootstrapped(files: TlsFiles, token: str) -> str:
    """The output of a joiner's program if a stranger with the certificate `files` answers it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    server = await asyncio.start_server(_refuse, "127.0.0.1", 0, ssl=context)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(BOOTSTRAP), address, "-", token),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(ENDS_S):
            printed, _ = await process.communicate()
    return printed.decode(errors="replace")


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse a request with a message that steers terminals."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"message": STEERING}).encode()
        writer.write(
            b"HTTP/1.1 403 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
        )
        await writer.drain()
    writer.close()
