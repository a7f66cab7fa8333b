"""Refusals without end, to hide what else was done. For sites of one's own on loopback."""

from __future__ import annotations

import asyncio
import time

import grpc

from edgeshard.proto.v1 import admin_pb2, admin_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles

_AT_ONCE = 64


async def drown(address: str, files: TlsFiles, *, count: int = 6000, seconds: float = 30.0) -> int:
    """Call methods that need an operator's certificate with a client's, `count` times or for
    `seconds`; return the refusals.
    """
    until, refused = time.monotonic() + seconds, 0
    async with open_channel(address, files) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for first in range(0, count, _AT_ONCE):
            if time.monotonic() >= until:
                break
            names = [f"m{number}" for number in range(first, min(count, first + _AT_ONCE))]
            calls = [admin.DeleteModel(admin_pb2.DeleteModelRequest(name=name)) for name in names]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            refused += sum(isinstance(end, grpc.aio.AioRpcError) for end in ends)
    return refused
