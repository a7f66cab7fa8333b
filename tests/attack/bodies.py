"""Bodies that begin and do not end."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from tests.attack.raw import dial, head, status_of


async def unfinished(
    url: str,
    key: str,
    *,
    count: int = 60,
    declared: int = 16 << 20,
    sent: int = 30 << 20,
    chunked: bool = False,
    seconds: float = 30.0,
) -> Counter[int]:
    """Send `count` chats at the same time whose bodies declare `declared` bytes and stop after
    `sent` of them. Return how often each status arrived within `seconds` (-1: none, 0: the
    connection ended)."""

    async def one() -> int:
        reader, writer = await dial(url)
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {declared}"
        writer.write(head("POST", "/v1/chat/completions", key, length))
        sending = asyncio.create_task(_send(writer, sent, chunked))
        try:
            return await status_of(reader, seconds)
        finally:
            sending.cancel()
            writer.close()

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def _send(writer: asyncio.StreamWriter, size: int, chunked: bool) -> None:
    piece = b" " * (64 << 10)
    with suppress(OSError):
        for _ in range(size // len(piece)):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()


async def dripping(url: str, key: str, *, count: int = 60, seconds: float = 30.0) -> Counter[int]:
    """Send `count` bodies, a byte every second; statuses as in `unfinished`."""

    async def one() -> int:
        reader, writer = await dial(url)
        writer.write(head("POST", "/v1/chat/completions", key, "Content-Length: 1000"))

        async def drip() -> None:
            with suppress(OSError):
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(1)

        sending = asyncio.create_task(drip())
        try:
            return await status_of(reader, seconds)
        finally:
            sending.cancel()
            writer.close()

    return Counter(await asyncio.gather(*(one() for _ in range(count))))
