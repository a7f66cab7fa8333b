"""A stream whose client leaves during a write is closed after its call is over: nothing may ask its
context then."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Denial, Role
from edgeshard.rpc.access import CallFrom
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from tests.support.identities import Identities

pytestmark = pytest.mark.timing
CALLS = 8
PATH = "/edgeshard.proto.v1.AdminService/Trace"


class Big(grpc.GenericRpcHandler):
    """Sends a message larger than any window, so that the client leaves while it is being sent."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            while True:
                yield bytes(3 << 20)

        return grpc.unary_stream_rpc_method_handler(many)


class Watch:
    def __init__(self) -> None:
        self.ends: list[CallFrom] = []
        self.has_all = asyncio.Event()

    def began(self, method: str, source: CallFrom, request: Any) -> None:
        pass

    def ended(
        self, method: str, source: CallFrom, request: Any, answer: Any, error: EdgeShardError | None
    ) -> None:
        self.ends.append(source)
        if len(self.ends) == CALLS:
            self.has_all.set()


@pytest.mark.parametrize("revoked", [False, True])
async def test_a_stream_that_is_closed_late_says_whose_it_was(
    tmp_path: Path, revoked: bool
) -> None:
    identities, watch = Identities(tmp_path), Watch()
    server = Server("127.0.0.1:0", identities.coordinator(), watch=watch)
    server.grpc.add_generic_rpc_handlers((Big(),))
    address = await server.start()
    try:
        async with open_channel(
            address, identities.of(Role.OPERATOR, "admin"), "address"
        ) as channel:
            for _ in range(CALLS):
                begin: Any = channel.unary_stream(PATH)
                call = begin(b"")
                await call.read()
                await asyncio.sleep(0.05)
                call.cancel()
            await asyncio.sleep(0.2)
            if revoked:
                server.denials.replace(
                    [Denial(identities.of(Role.OPERATOR, "admin").principal(), ())]
                )
            gc.collect()
            await asyncio.wait_for(watch.has_all.wait(), 10)
        assert {end.principal for end in watch.ends} == {
            identities.of(Role.OPERATOR, "admin").principal()
        }
        assert all(end.address.startswith("127.0.0.1:") and end.is_named for end in watch.ends)
    finally:
        await server.stop()
