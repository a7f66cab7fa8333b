"""A link that dies without a word, a cable pulled or a node that lost its power, is noticed by both
its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from edgeshard.rpc import server as server_module
from edgeshard.rpc.channel import KEEPALIVE_S, open_channel
from edgeshard.rpc.server import Server
from tests.support.stalling_proxy import StallingProxy

pytestmark = pytest.mark.timing

METHOD = "/tests.Keepalive/Wait"
SOON_S = 30.0
"""A quiet machine takes four seconds; without keepalive a dead link is never noticed while nothing
is sent."""
PING_TIMEOUT_S = 3.0
QUIET_S = 6.0


@pytest.fixture(autouse=True)
def impatient_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server waits a minute for the answer to a ping, which is too long for a test."""
    options = [*server_module._OPTIONS, ("grpc.http2.ping_timeout_ms", int(1000 * PING_TIMEOUT_S))]
    monkeypatch.setattr(server_module, "_OPTIONS", options)


class Waiting(grpc.GenericRpcHandler):
    """Answers a call once and then keeps it open; `left` is set when the caller has gone."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        async def wait(
            request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            try:
                yield b"here"
                await asyncio.Event().wait()
            finally:
                self.left.set()

        return grpc.unary_stream_rpc_method_handler(wait) if details.method == METHOD else None


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Waiting, StallingProxy]]:
    """A server of the project on a proxied connection, which a stall cuts."""
    handler, server = Waiting(), Server("127.0.0.1:0", None)
    server.grpc.add_generic_rpc_handlers((handler,))
    try:
        async with StallingProxy(await server.start()).running() as cable:
            yield handler, cable
    finally:
        await server.stop(0)


async def begun(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    """A call that the server has answered once."""
    callable_: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
    call = callable_(b"")
    async with asyncio.timeout(SOON_S):
        assert await call.read() == b"here"
    return call


def careless_channel(address: str) -> grpc.aio.Channel:
    """A channel with gRPC's defaults."""
    return grpc.aio.insecure_channel(
        address, [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    )


async def test_a_caller_notices_a_dead_link_because_of_keepalive() -> None:
    async with (
        serving() as (_, cable),
        open_channel(cable.address, None, ping_timeout_s=PING_TIMEOUT_S) as channel,
        careless_channel(cable.address) as careless,
    ):
        call, unaware = await begun(channel), await begun(careless)
        cable.stall()
        async with asyncio.timeout(SOON_S):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not unaware.done(), "it was not keepalive that told"


async def test_an_idle_channel_notices_a_dead_link() -> None:
    """So that the next call does not go into it."""
    async with (
        serving() as (_, cable),
        open_channel(cable.address, None, ping_timeout_s=PING_TIMEOUT_S) as channel,
    ):
        (await begun(channel)).cancel()
        # Beyond the answer to any ping that was sent while there was a call.
        await asyncio.sleep(3 * KEEPALIVE_S)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        cable.stall()
        async with asyncio.timeout(SOON_S):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_a_server_notices_that_a_caller_is_gone() -> None:
    """The caller itself sends no pings: the server ends its call."""
    async with serving() as (handler, cable), careless_channel(cable.address) as careless:
        call = await begun(careless)
        assert not handler.left.is_set()
        cable.stall()
        async with asyncio.timeout(SOON_S):
            await handler.left.wait()
        assert not call.done()


async def test_a_quiet_link_is_kept_and_its_death_still_noticed() -> None:
    """More pings without data than gRPC allows by itself, on either side: two, and then the server
    ends the call."""
    async with (
        serving() as (handler, cable),
        open_channel(cable.address, None, ping_timeout_s=PING_TIMEOUT_S) as channel,
    ):
        call = await begun(channel)
        ended = asyncio.create_task(call.code())
        await asyncio.wait([ended], timeout=QUIET_S)
        assert not ended.done() and not handler.left.is_set()
        cable.stall()
        async with asyncio.timeout(SOON_S):
            assert await ended is grpc.StatusCode.UNAVAILABLE
            await handler.left.wait()
