"""Measure the HTTP gateway's costs: processor time a token at 16 streams, and slow readers next to
a fast one.

The gateway is the product's, on a real socket. Instead of a site it gets tokens by the clock, and
its clients are another process. So the time of this process is only the gateway's.

    python -m bench.gateway [--streams 16] [--tokens 500] [--slow 200]      prints JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bench.sizes import sized
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from tests.support.clockwork import Clockwork, Open


def body(path: str, tokens: int) -> bytes:
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": tokens},
        "/v1/chat/completions": {"messages": messages, "max_tokens": tokens},
        "/v1/responses": {"input": "x", "max_output_tokens": tokens},
        "/api/chat": {"messages": messages, "options": {"num_predict": tokens}},
    }
    text = json.dumps({"model": "m", "stream": True, **asked[path]}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
        f"{len(text)}\r\n\r\n"
    )
    return head.encode() + text


async def read(port: int, path: str, tokens: int, pause_s: float = 0.0) -> float:
    """One stream to its end; its longest gap in seconds. With `pause_s`, a slow reader: a kilobyte,
    then a pause."""
    dialled = socket.socket()
    if pause_s:
        # or the kernel would read for it
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    dialled.setblocking(False)
    await asyncio.get_running_loop().sock_connect(dialled, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=dialled, limit=4096)
    writer.write(body(path, tokens))
    last = time.monotonic()
    longest = 0.0
    received = 0
    while data := await reader.read(1024):
        received += len(data)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    if received < 80 * tokens:
        raise SystemExit(f"a stream had {received} bytes: that is not {tokens} tokens")
    return longest


async def clients(port: int, path: str, streams: int, tokens: int, slow: int) -> None:
    """Fast streams and slow ones; the slow ones are dropped when the fast ones are done."""
    idle = [asyncio.create_task(read(port, path, 100_000, 5.0)) for _ in range(slow)]
    if slow:
        await asyncio.sleep(sized(20, 0.1))
    gaps = await asyncio.gather(*(read(port, path, tokens) for _ in range(streams)))
    for task in idle:
        task.cancel()
    print(max(gaps))


async def measure(path: str, streams: int, tokens: int, slow: int = 0) -> dict[str, float]:
    backend = Clockwork()
    backend.start()
    server = GatewayServer(make_app(backend, Open()), HttpListen("127.0.0.1:0"))
    await server.start()
    port = server.url.rpartition(":")[2]
    arguments = [
        "--port",
        port,
        "--path",
        path,
        "--streams",
        streams,
        "--tokens",
        tokens,
        "--slow",
        slow,
    ]
    idle_began, began = time.process_time(), time.monotonic()
    await asyncio.sleep(sized(1, 0.1))
    idle_s = (time.process_time() - idle_began) / (time.monotonic() - began)
    before, began = time.process_time(), time.monotonic()
    others = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.gateway", *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await others.communicate()
    took_s = time.monotonic() - began
    busy_s = time.process_time() - before - idle_s * took_s
    await server.stop()
    return {
        "streams": streams,
        "slow_readers": slow,
        "ms_per_token": 1000 * busy_s / (streams * tokens) if not slow else 0.0,
        "longest_gap_s": float(out),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--port", type=int, help="be the clients of a gateway there")
    parser.add_argument("--path", default="/v1/chat/completions")
    asked = parser.parse_args()
    if asked.port is not None:
        await clients(asked.port, asked.path, asked.streams, asked.tokens, asked.slow)
        return
    rows = {}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat"):
        rows[path] = await measure(path, asked.streams, asked.tokens)
    rows["slow readers"] = await measure(
        "/v1/chat/completions", asked.streams, asked.tokens, asked.slow
    )
    print(json.dumps({"python": Path(sys.executable).name, "rows": rows}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
