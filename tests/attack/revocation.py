"""The open calls of a principal when its certificate is revoked, and its later calls. For sites of
one's own on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgeshard.domain.ids import NodeName
from edgeshard.proto.v1 import inference_pb2, inference_pb2_grpc, stage_pb2, stage_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles

OPEN = "OPEN"


async def linger(
    address: str,
    files: TlsFiles,
    revoke: Callable[[], Awaitable[None]],
    *,
    node: str = "",
    seconds: float = 20.0,
) -> dict[str, str]:
    """Open long-lived calls, at a node with `node` and else at the coordinator, have the
    certificate revoked, and continue.

    How each ended within `seconds`: the name of its status, or OPEN.
    """
    async with open_channel(address, files, node=NodeName(node) if node else None) as channel:
        calls = {"Watch": await _watch(channel)}
        calls |= (
            {"Probe": await _probe(channel), "idle": await _probe(channel)}
            if node
            else await _listen(channel)
        )
        probing = asyncio.create_task(_probe_on(calls["Probe"])) if node else None
        try:
            await revoke()
            return {name: await _end(call, seconds) for name, call in calls.items()}
        finally:
            if probing is not None:
                probing.cancel()
            for call in calls.values():
                call.cancel()


async def _watch(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    await call.read()
    return call


async def _listen(channel: grpc.aio.Channel) -> dict[str, Any]:
    call: Any = inference_pb2_grpc.InferenceServiceStub(channel).Listen()
    await call.write(inference_pb2.ListenRequest(listener="x"))
    await call.initial_metadata()
    return {"Listen": call}


async def _probe(channel: grpc.aio.Channel) -> Any:
    call: Any = stage_pb2_grpc.StageServiceStub(channel).Probe()
    await _probe_once(call)
    return call


async def _probe_once(call: Any) -> None:
    await call.write(stage_pb2.ProbeRequest(payload=b"x" * 1024, last=True))
    await call.read()


async def _probe_on(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await _probe_once(call)
            await asyncio.sleep(0.01)


async def _end(call: Any, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            return str((await call.code()).name)
    except TimeoutError:
        return OPEN
