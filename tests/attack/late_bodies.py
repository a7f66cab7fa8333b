"""Requests that begin before a revocation and end after it. For sites of one's own on loopback."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tests.attack.raw import Opened, dial, head, status_of

ANSWERS_S = 10.0
LATER_S = 1.0
"""After a revocation, by when all that was open must have ended."""
Sent = tuple[str, str, Any, Sequence[str]]
"""Method, path, body and header lines."""


async def begun(url: str, key: str | None, sent: Sent) -> tuple[Opened, bytes]:
    """A connection over which all of a request went but the end of its body, and that end."""
    method, path, body, lines = sent
    data = json.dumps(body).encode()
    opened = await dial(url)
    fixed = (f"Content-Length: {len(data)}", "Content-Type: application/json", "Connection: close")
    opened[1].write(head(method, path, key, *fixed, *lines, host=urlsplit(url).netloc) + data[:-1])
    return opened, data[-1:]


async def late(
    url: str, key: str | None, requests: Mapping[str, Sent], revoke: Callable[[], Awaitable[None]]
) -> Counter[str]:
    """Begin each request, have it revoked, and send the rest of each later; how often each had
    which status."""
    opened = {name: await begun(url, key, sent) for name, sent in requests.items()}
    met: Counter[str] = Counter()
    try:
        await asyncio.sleep(LATER_S / 2)
        await revoke()
        await asyncio.sleep(LATER_S)
        for name, ((reader, writer), rest) in opened.items():
            try:
                writer.write(rest)
                met[f"{name}: {await status_of(reader, ANSWERS_S)}"] += 1
            except OSError:
                met[f"{name}: 0"] += 1
    finally:
        for (_, writer), _ in opened.values():
            writer.close()
    return met


async def streamed_after(
    url: str, key: str, sent: Sent, revoke: Callable[[], Awaitable[None]], seconds: float
) -> float | None:
    """Seconds that an answer continues after the revocation of its key; None if it has not ended
    after `seconds`."""
    method, path, body, lines = sent
    data = json.dumps(body).encode()
    reader, writer = await dial(url)
    loop = asyncio.get_running_loop()
    try:
        fixed = (
            f"Content-Length: {len(data)}",
            "Content-Type: application/json",
            "Connection: close",
        )
        writer.write(head(method, path, key, *fixed, *lines, host=urlsplit(url).netloc) + data)
        await reader.readuntil(b"data: ")
        await revoke()
        revoked_s = loop.time()
        async with asyncio.timeout(seconds):
            while await reader.read(65536):
                pass
    except TimeoutError:
        return None
    except OSError:
        pass
    finally:
        writer.close()
    return loop.time() - revoked_s
