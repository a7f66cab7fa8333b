"""Malformed requests to the gateway and its dashboard: each is an error of the client's, and no
line of the log."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.forms import LONG as LONG_FORM
from tests.support.membership import SecureSite

pytestmark = pytest.mark.timing

LONG = "9" * 5000
AT_ONCE = 8
PATHS = (
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/dashboard/",
    "/dashboard/session",
    "/dashboard/stream",
    "/docs",
)
TARGETS = (
    *(
        "//[",
        "/[",
        "/%",
        "/%ff",
        "/%00",
        "/%zz",
        "/?" + "&".join("a=1" for _ in range(2000)),
        "/?%ff=%",
        "*",
        "/#",
    ),
    *(
        "http://[/v1/models",
        "http://[::1/v1/models",
        "http://x:abc/",
        f"http://x:{LONG}/",
        "http:///",
        "https://",
    ),
    *(
        "/v1/models/%00",
        "/v1/models/%ff",
        "/v1/models/..%2f..",
        "/dashboard/%00",
        "/dashboard/../x",
        "/api/tags/%",
    ),
)
HEADERS = (
    *(
        "Host: [",
        "Host: [::1",
        "Host: 127.0.0.1:abc",
        f"Host: 127.0.0.1:{LONG}",
        "Host: \xff",
        "Host: ",
    ),
    *(
        f"Content-Length: {LONG}",
        "Content-Length: -1",
        "Content-Length: \xb2",
        "Content-Length: 1, 2",
    ),
    *(
        "Origin: http://[",
        f"Origin: http://x:{LONG}",
        "Origin: null",
        "Cookie: a=\xff; =;;",
        'Cookie: [="\\377',
    ),
    *(
        "Authorization: Bearer \xff",
        "Authorization: \xff",
        "Authorization: Bearer",
        "X-Api-Key: \xff",
    ),
    *(
        "Accept: application/openmetrics-text;version=abc",
        f"Accept: text/plain;q={LONG}",
        "Last-Event-ID: \xff",
    ),
    *(
        "Content-Encoding: gzip, gzip",
        "Transfer-Encoding: gzip",
        "Range: bytes=9-1",
        "If-None-Match: \xff",
    ),
    *(
        "Expect: 100-continue",
        f"Keep-Alive: timeout={LONG}",
        "X-Forwarded-For: [",
        "Accept-Language: \xff",
    ),
    "Access-Control-Request-Method: [",
)


async def status_of(url: str, request: str) -> str:
    """The status of an answer, '' if the connection is closed without one."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(request.encode("latin-1"))
        async with asyncio.timeout(30):
            line = await reader.readline()
        return line.decode("latin-1").partition(" ")[2].strip()
    except ConnectionError:
        return ""
    finally:
        writer.close()


async def test_a_malformed_request_is_no_failure_of_the_server(tmp_path: Path) -> None:
    async with SecureSite(tmp_path, "--http-listen", "127.0.0.1:0") as mill:
        url = mill.coordinator.gateway
        host = urlsplit(url).netloc
        odd = [
            (method, target, f"Host: {host}")
            for method, target in product(("GET", "POST", "OPTIONS"), TARGETS)
        ]
        odd += [
            (method, path, header)
            for method, path, header in product(("GET", "POST"), PATHS, HEADERS)
        ]
        async with mill.client_of() as admin:
            key = await admin.create_key("k")
        failed = []
        statuses = set()

        async def ask(method: str, target: str, header: str) -> None:
            lines = [f"{method} {target} HTTP/1.1", header]
            if not header.startswith("Host:"):
                lines.append(f"Host: {host}")
            if not header.startswith("Authorization:"):
                lines.append(f"Authorization: Bearer {key}")
            has_body = method == "POST" and not header.startswith(
                ("Content-Length:", "Transfer-Encoding:")
            )
            if has_body:
                lines.append("Content-Length: 2")
            status = await status_of(url, "\r\n".join([*lines, "", "{}" if has_body else ""]))
            statuses.add(status)
            if status.startswith("5"):
                failed.append((method, target[:60], header[:60], status))

        odd = odd if LONG_FORM else odd[::5]  # each header and each target is in it
        for first in range(0, len(odd), AT_ONCE):
            await asyncio.gather(*(ask(*each) for each in odd[first : first + AT_ONCE]))
        assert not failed
        assert {"200 OK", "400 Bad Request", "404 Not Found"} <= statuses
        log = (tmp_path / "coordinator.log").read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
