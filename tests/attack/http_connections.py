"""Connections to the gateway that say nothing, or not all."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


@asynccontextmanager
async def silent(
    url: str, *, count: int = 512, begin: bytes = b""
) -> AsyncIterator[list[socket.socket]]:
    """`count` connections that say `begin` and then nothing, no handshake of TLS either; held until
    the end."""
    where = urlsplit(url)
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(await _opened(where.hostname or "", where.port or 0, begin))
        yield held
    finally:
        for sock in held:
            sock.close()


async def churning(url: str, *, seconds: float = 30.0, at_once: int = 512) -> int:
    """Silent connections; the oldest is repeatedly replaced by a new one. Returns their number."""
    where = urlsplit(url)
    held: list[socket.socket] = []
    made, until = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            with suppress(OSError):
                held.append(await _opened(where.hostname or "", where.port or 0, b""))
                made += 1
            if len(held) > at_once:
                held.pop(0).close()
    finally:
        for sock in held:
            sock.close()
    return made


def still_open(held: list[socket.socket]) -> int:
    """Those of them that the other side has not ended."""
    count = 0
    for sock in held:
        try:
            count += sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


async def _opened(host: str, port: int, begin: bytes) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, port))
    if begin:
        await loop.sock_sendall(sock, begin)
    return sock
