"""HTTP as an attacker speaks it: bytes over connections that may stay silent. For sites of one's
own on loopback."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.support.http import Http

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def dial(url: str) -> Opened:
    """A connection to the gateway at `url`, without a check of its certificate. Raises OSError."""
    where = urlsplit(url)
    assert where.hostname in ("127.0.0.1", "::1", "localhost"), "attacks are for sites of one's own"
    context: ssl.SSLContext | None = None
    if where.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection(where.hostname, where.port, ssl=context)


def head(method: str, path: str, key: str | None, *lines: str, host: str = "localhost") -> bytes:
    shown = [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", f"Host: {host}", *shown, *lines, "", ""]
    ).encode()


async def status_of(reader: asyncio.StreamReader, timeout_s: float) -> int:
    """The status of the next answer; 0 for a connection that ended, -1 if none arrives in time."""
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readline()
    except TimeoutError:
        return -1
    except OSError:
        return 0
    return int(line.split()[1]) if line.startswith(b"HTTP/") else 0


async def ask(url: str, key: str | None, path: str, body: Any, timeout_s: float = 60.0) -> int:
    """The status of one POST over a connection of its own; 0 and -1 as `status_of`."""
    data = json.dumps(body).encode()
    try:
        reader, writer = await dial(url)
    except OSError:
        return 0
    try:
        writer.write(
            head("POST", path, key, f"Content-Length: {len(data)}", "Connection: close") + data
        )
        return await status_of(reader, timeout_s)
    finally:
        writer.close()


@asynccontextmanager
async def beside(http: Http, path: str, body: Any) -> AsyncIterator[list[float]]:
    """An honest client that asks again and again, one request after the other; how long each took,
    in seconds. Every answer must be 200."""
    took: list[float] = []

    async def go_on() -> None:
        while True:
            began = time.monotonic()
            answer = await http.post(path, body)
            assert answer.status == 200, answer.body
            took.append(time.monotonic() - began)

    asking = asyncio.create_task(go_on())
    try:
        yield took
    finally:
        asking.cancel()
        (ended,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
            raise ended
