"""Connections to a gRPC port from somebody who has no certificate. For sites of one's own on
loopback."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

from edgeshard.rpc.tls import split_address

Kind = Literal["silent", "half"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of connections that were made, that the other side still had at the end, and that
    it had most of the time.
    """

    made: int
    still_open: int
    most_open: int


async def hold(
    address: str, *, count: int = 3000, seconds: float = 30.0, kind: Kind = "silent"
) -> Outcome:
    """Open `count` connections at once and keep them for `seconds`, or until the other side has
    closed all. A `silent` connection sends nothing at all; a `half` one begins a handshake of TLS
    and does not continue."""
    held: list[socket.socket] = []
    until, most = time.monotonic() + seconds, 0
    try:
        for _ in range(count):
            held.append(await _opened(address, kind))
        now_open = len(held)
        while now_open and time.monotonic() < until:
            await asyncio.sleep(min(0.5, seconds))
            now_open = _open(held)
            most = max(most, now_open)
        return Outcome(len(held), now_open, most)
    finally:
        for sock in held:
            sock.close()


async def churn(
    address: str, *, seconds: float = 30.0, at_once: int = 3000, kind: Kind = "silent"
) -> int:
    """Keep `at_once` connections, and make a new one for each that the other side closes; how many
    there were."""
    held: list[socket.socket] = []
    made, until = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            for sock in [sock for sock in held if not _is_open(sock)]:
                held.remove(sock)
                sock.close()
            while len(held) < at_once and time.monotonic() < until:
                held.append(await _opened(address, kind))
                made += 1
            await asyncio.sleep(0.05)
    finally:
        for sock in held:
            sock.close()
    return made


async def _opened(address: str, kind: Kind) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, split_address(address))
    if kind == "half":
        await loop.sock_sendall(sock, _hello())
    return sock


@cache
def _hello() -> bytes:
    """A client's first message. It may be the same each time."""
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), outgoing, server_hostname="localhost"
        ).do_handshake()
    return outgoing.read()


def _open(held: list[socket.socket]) -> int:
    return sum(map(_is_open, held))


def _is_open(sock: socket.socket) -> bool:
    try:
        while data := sock.recv(65536):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
