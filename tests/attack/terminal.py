"""Texts that steer the terminal of a user who lists a site. For sites of one's own on loopback."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc

from edgeshard import WIRE_VERSION
from edgeshard.proto.v1 import (
    common_pb2,
    coordinator_pb2,
    coordinator_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from edgeshard.wire.status import from_rpc_error

STEERING = (
    "\x1b[2J",
    "a\nb",
    "\r",
    "\x9b31m",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u2028",
    "\u061c",
    "\x00",
)
FACTS = ("kind", "model", "software", "bits_fingerprint")


async def say_as_a_node(channel: grpc.aio.Channel, name: str, text: str) -> dict[str, str]:
    """Register with `text` in every field that has one; the field that each refusal named, '' for
    none."""
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    met: dict[str, str] = {}
    for field in (
        "name",
        "node_id",
        "address",
        "incarnation",
        *(f"facts.{fact}" for fact in FACTS),
    ):
        request = coordinator_pb2.RegisterRequest(
            node_id=f"id-{name}",
            name=name,
            address="127.0.0.1:7000",
            wire_version=WIRE_VERSION,
            incarnation="i",
        )
        request.facts.CopyFrom(common_pb2.DeviceFacts(kind="cpu", model="m", cores=1, software="s"))
        outer, _, fact = field.partition(".")
        setattr(request.facts if fact else request, fact or outer, text)
        met[field] = await _refused(stub.Register(request, timeout=20))
    return met


async def say_as_a_client(channel: grpc.aio.Channel, text: str) -> str:
    """Name a request so."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await _refused(
        stub.Cancel(inference_pb2.InferenceServiceCancelRequest(request_id=text), timeout=20)
    )


async def _refused(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).field
    return ""
