"""Guesses of a token's secret, to use up the token or everybody's turn. For sites of one's own on
loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from edgeshard.identity.authority import new_key, request_for
from edgeshard.proto.v1 import identity_pb2, identity_pb2_grpc
from edgeshard.rpc.tls import split_address


def entrance(address: str, authority: bytes, site: str) -> grpc.aio.Channel:
    """A channel to the listener for joiners, without a certificate; `authority` is the site's, in
    PEM."""
    options = [("grpc.ssl_target_name_override", f"coordinator.coordinator.{site}")]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options)


async def guess(
    address: str,
    authority: bytes,
    site: str,
    token_id: str,
    *,
    count: int = 100_000,
    seconds: float = 30.0,
) -> Counter[str]:
    """Try `count` wrong secrets, or for `seconds`; return how often each status arrived."""
    until, met = time.monotonic() + seconds, Counter[str]()
    request = request_for(new_key())
    async with entrance(address, authority, site) as channel:
        stub = identity_pb2_grpc.EnrolmentServiceStub(channel)
        for number in range(count):
            if time.monotonic() >= until:
                break
            wrong = identity_pb2.EnrolRequest(
                token_id=token_id, secret=number.to_bytes(16), request=request
            )
            try:
                await stub.Enrol(wrong, timeout=20)
            except grpc.aio.AioRpcError as error:
                met[error.code().name] += 1
    return met


async def hold_turns(
    address: str, authority: bytes, site: str, *, count: int = 64, seconds: float = 30.0
) -> None:
    """Begin `count` calls on one connection, without sending their messages."""
    async with entrance(address, authority, site) as channel:
        calls: list[Any] = [
            channel.stream_unary("/edgeshard.proto.v1.EnrolmentService/Enrol")()
            for _ in range(count)
        ]
        try:
            await asyncio.sleep(seconds)
        finally:
            for call in calls:
                call.cancel()


@contextlib.asynccontextmanager
async def dialled_from(source: str, target: str) -> AsyncIterator[str]:
    """An address of loopback that leads to `target`, which sees connections from the host
    `source`."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_address(target)
        there, back = await asyncio.open_connection(host, port, local_addr=(source, 0))
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
