"""One client's requests that ended, resumed as others, to pass its quota. For sites of one's own on
loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import grpc

from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation
from edgeshard.proto.v1 import inference_pb2, inference_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.generation import generation_to_wire
from edgeshard.wire.status import from_rpc_error

STARTED = "STARTED"
SMALL = Generation("once", max_new_tokens=1)
LARGE = Generation(
    "a far longer tale of which nobody has heard", max_new_tokens=100, ignore_eos=True, priority=10
)


async def resume_ended(
    address: str, files: TlsFiles | None, model: str, *, count: int = 100, seconds: float = 15.0
) -> dict[str, Counter[str]]:
    """Let `count` requests of one token end, one after the other, and resume all of them at once.

    Returns the number that ran (STARTED) and the refusals of the others within `seconds`, for each
    way of resuming: `others` are another generation with the highest priority, `same` is what had
    ended, and `never` are ids of no request.
    """
    async with open_channel(address, files) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        ids = [f"attack-{number}" for number in range(count)]
        for id in ids:
            await _ended(stub, _request(model, id, SMALL, resume=False), seconds)
        found = {}
        for name, generation, prefix in (
            ("others", LARGE, ""),
            ("never", SMALL, "never-"),
            ("same", SMALL, ""),
        ):
            wanted = [_request(model, prefix + id, generation, resume=True) for id in ids]
            found[name] = await _together([stub.Generate(each, timeout=seconds) for each in wanted])
        return found


async def let_end(
    address: str, files: TlsFiles | None, model: str, *, count: int = 100, seconds: float = 15.0
) -> int:
    """`count` requests of one token, one after the other, as `resume_ended` begins; how many there
    were."""
    async with open_channel(address, files) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(count):
            await _ended(
                stub, _request(model, f"attack-{uuid4().hex}", SMALL, resume=False), seconds
            )
    return count


async def _ended(stub: Any, request: inference_pb2.GenerateRequest, seconds: float) -> None:
    async for _ in stub.Generate(request, timeout=seconds):
        pass


def _request(
    model: str, id: str, generation: Generation, *, resume: bool
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=model,
        request_id=RequestId(id),
        generation=generation_to_wire(generation),
        resume=inference_pb2.Resumption() if resume else None,
    )


async def _together(calls: list[Any]) -> Counter[str]:
    """No call leaves before all have their first answer: all of them were there at the same
    time."""
    try:
        return Counter(await asyncio.gather(*map(_first, calls)))
    finally:
        for call in calls:
            call.cancel()


async def _first(call: Any) -> str:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return STARTED
