"""Closing one's own half of a call: harmless for a call that is already over, whatever grpcio makes
of it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from edgeshard.rpc.channel import half_close


class BrokenUnderneath:
    """A call whose connection broke a moment before: core refuses the operation, and grpcio hands
    that on."""

    async def done_writing(self) -> None:
        raise grpc.aio.InternalError("Failed to execute a batch")


async def test_a_call_that_just_broke_keeps_its_status_for_the_caller() -> None:
    call: Any = BrokenUnderneath()
    await half_close(call)


async def test_a_call_that_goes_on_hears_that_nothing_more_comes() -> None:
    async def count(messages: Any, context: Any) -> bytes:
        return bytes([len([message async for message in messages])])

    server = grpc.aio.server()
    handler: Any = grpc.stream_unary_rpc_method_handler(count)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Count", {"Count": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_unary("/test.Count/Count")()
        await call.write(b"one")
        await half_close(call)
        assert await call == b"\1"

        refused: Any = channel.stream_unary("/test.Count/Nothing")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused
        await half_close(refused)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)
