"""Requests that two readers of HTTP take for different ones: a proxy in front of the gateway, and
the gateway."""

from __future__ import annotations

import asyncio

from tests.attack.raw import dial

INNER = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""The smuggled text: a server that takes it for a request answers twice."""


def _post(lines: bytes, body: bytes) -> bytes:
    return b"POST /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n" + body


REQUESTS = {
    "both lengths": _post(
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % (5 + len(INNER)),
        b"0\r\n\r\n" + INNER,
    ),
    "both lengths, the other way round": _post(
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", b"0\r\n\r\n" + INNER
    ),
    "chunks in HTTP/1.0": b"POST /health HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + INNER,
    "a bare LF behind the request line": b"GET /health HTTP/1.1\nHost: localhost\r\n\r\n",
    "a bare LF behind a header": b"GET /health HTTP/1.1\r\nX: a\nHost: localhost\r\n\r\n",
    "a bare LF as the end of the headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n" + INNER,
    "a bare LF in a trailer": _post(b"Transfer-Encoding: chunked\r\n", b"0\r\nX: y\n\n" + INNER),
    "a bare LF behind the last chunk": _post(b"Transfer-Encoding: chunked\r\n", b"0\r\n\n" + INNER),
    "a bare LF in the second request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    b"GET /version HTTP/1.1\nHost: x\n\n",
}


async def sent(url: str, request: bytes, *, seconds: float = 10.0) -> tuple[list[int], bool]:
    """The statuses of all answers, and whether the gateway closed the connection within
    `seconds`."""
    reader, writer = await dial(url)
    said = bytearray()
    closed = False
    try:
        writer.write(request)
        async with asyncio.timeout(seconds):
            while data := await reader.read(65536):
                said += data
            closed = True
    except TimeoutError:
        pass
    except OSError:
        closed = True
    finally:
        writer.close()
    statuses = [int(part.split()[0]) for part in bytes(said).split(b"HTTP/1.1 ")[1:]]
    return statuses, closed
