"""A refused request is freed at once, not when the collector of garbage runs next: it may be
large."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Role
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from tests.support.identities import Identities

pytestmark = pytest.mark.timing
PATIENCE_S = 10.0
UNARY = "/edgeshard.proto.v1.AdminService/ListNodes"
STREAM = "/edgeshard.proto.v1.AdminService/Trace"


class Request:
    def __init__(self, data: bytes) -> None:
        self.data = data


class Refusing(grpc.GenericRpcHandler):
    """Refuses its input, as a codec does: an error of its own after one of a library."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()

    def service(self, details: Any) -> Any:
        def read(request: Request) -> bytes:
            try:
                raise ValueError(len(request.data))
            except ValueError:
                raise InvalidArgumentError("no", field="request") from None

        def received(data: bytes) -> Request:
            request = Request(data)
            weakref.finalize(request, self.freed.set)
            return request

        async def one(request: Request, context: Any) -> bytes:
            return read(request)

        async def many(request: Request, context: Any) -> AsyncIterator[bytes]:
            yield read(request)

        if details.method == UNARY:
            return grpc.unary_unary_rpc_method_handler(one, request_deserializer=received)
        return grpc.unary_stream_rpc_method_handler(many, request_deserializer=received)


@pytest.mark.parametrize("path", [UNARY, STREAM])
async def test_a_refused_request_is_freed_without_the_collector(tmp_path: Path, path: str) -> None:
    identities, refusing = Identities(tmp_path), Refusing()
    server = Server("127.0.0.1:0", identities.coordinator())
    server.grpc.add_generic_rpc_handlers((refusing,))
    address = await server.start()
    gc.collect()
    gc.disable()
    try:
        async with open_channel(
            address, identities.of(Role.OPERATOR, "admin"), "address"
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                call: Any = (
                    channel.unary_unary(path) if path == UNARY else channel.unary_stream(path)
                )
                await (call(b"x") if path == UNARY else call(b"x").read())
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await asyncio.wait_for(refusing.freed.wait(), PATIENCE_S)
    finally:
        gc.enable()
        await server.stop(0.0)
