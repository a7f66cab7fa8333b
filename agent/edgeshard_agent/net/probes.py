"""Answering the probes of other boxes, through the server that takes the frames of their hops."""

from __future__ import annotations

from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard_agent.net.first_request import first_request

MOST_PAYLOAD_BYTES = 64 << 20


async def serve_probe(context: Any) -> None:
    """Acknowledge every payload of one stream, and keep none of it."""
    received = 0
    request = await first_request(context, "payload")
    while isinstance(request, pb.ProbeRequest):
        received += len(request.payload)
        if received > MOST_PAYLOAD_BYTES:
            raise InvalidArgumentError(f"a probe is at most {MOST_PAYLOAD_BYTES} bytes", field="payload")
        if request.last:
            await context.write(pb.ProbeResponse(received_bytes=received))
            received = 0
        request = await context.read()
