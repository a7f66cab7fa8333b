"""Silent streams of one certificate, as many as it can open. For sites of one's own on loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgeshard.proto.v1 import inference_pb2, inference_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.status import from_rpc_error

OPEN = "OPEN"
_REFUSES_S = 1.0


async def open_many(
    address: str, files: TlsFiles, kind: str = "Listen", *, count: int = 2000, seconds: float = 30.0
) -> Counter[str]:
    """Open `count` streams of a `kind`, health's Watch or a coordinator's Listen, and keep them
    until each answered.

    Returns how many are open at the same time then, and the refusals of the others within
    `seconds`.
    """
    async with open_channel(address, files) as channel:
        opened = _watch if kind == "Watch" else _listen
        calls = await asyncio.gather(*(opened(channel, number) for number in range(count)))
        try:
            return Counter(await asyncio.gather(*(_answer(call, seconds) for call in calls)))
        finally:
            for call in calls:
                call.cancel()


async def _watch(channel: grpc.aio.Channel, number: int) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest())


async def _listen(channel: grpc.aio.Channel, number: int) -> Any:
    call: Any = inference_pb2_grpc.InferenceServiceStub(channel).Listen()
    await asyncio.gather(  # one that is refused takes no message
        call.write(inference_pb2.ListenRequest(listener=f"l{number}")), return_exceptions=True
    )
    return call


async def _answer(call: Any, seconds: float) -> str:
    """A stream that stays sends its headers; a refused one ends with them or soon after them."""
    try:
        async with asyncio.timeout(seconds):
            if isinstance(call, grpc.aio.UnaryStreamCall):
                await call.read()
            else:
                await call.initial_metadata()
                await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=_REFUSES_S)
                if call.done():
                    await call.read()  # raises the error it ended with
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    except TimeoutError:
        return "SILENT"
    return "ENDED" if call.done() else OPEN
