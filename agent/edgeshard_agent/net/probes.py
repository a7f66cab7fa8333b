"""Answering the probes of other nodes, through the server that takes the frames of their hops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import Principal
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.rpc.access import caller
from edgeshard_agent.net.streams import first_request

MOST_PAYLOAD_BYTES = 64 << 20
"""Limit of one stream's payloads together; a node sends 40 MiB at most."""
MOST_STREAMS = 2
"""Limit of one node at a time: it has one, and may not have noticed yet that another is over."""
HELD_BYTES = 512 << 20
BYTES_PER_S = 4 << 20
"""The limit of one node's probes over many streams: this many bytes at once, and this many a second."""


@dataclass(slots=True)
class _Budget:
    """`left_bytes` were left at `at`, in seconds of a steady clock."""

    left_bytes: float
    at: float


class Probes:
    """Answers probes. The bytes that a node may send are counted over all its streams. In
    plaintext, nodes cannot be distinguished, and each stream has only its own limit. `now` is in
    steady seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._budgets: dict[Principal, _Budget] = {}
        self._open: Counter[Principal | None] = Counter()

    async def serve(self, context: Any) -> None:
        """Acknowledge every payload of one stream, and keep no payload.

        Raises InvalidArgumentError for too long a stream, ResourceExhaustedError for too many or too much of one node.
        """
        prober = caller(context)
        if prober is not None and self._open[prober] >= MOST_STREAMS:
            raise ResourceExhaustedError(
                f"{prober} has {MOST_STREAMS} probes open already: end one first", field="payload", reason="PROBES"
            )
        self._open[prober] += 1
        try:
            await self._answer(context, prober)
        finally:
            self._open[prober] -= 1

    async def _answer(self, context: Any, prober: Principal | None) -> None:
        received = total = 0
        request = await first_request(context, "payload")
        while isinstance(request, pb.ProbeRequest):
            received += len(request.payload)
            total += len(request.payload)
            if total > MOST_PAYLOAD_BYTES:
                raise InvalidArgumentError(f"a probe is at most {MOST_PAYLOAD_BYTES} bytes", field="payload")
            self._charge(prober, len(request.payload))
            if request.last:
                await context.write(pb.ProbeResponse(received_bytes=received))
                received = 0
            request = await context.read()

    def _charge(self, prober: Principal | None, count: int) -> None:
        if prober is None:
            return
        now = self._now()
        budget = self._budgets.setdefault(prober, _Budget(HELD_BYTES, now))
        budget.left_bytes = min(HELD_BYTES, budget.left_bytes + (now - budget.at) * BYTES_PER_S) - count
        budget.at = now
        if budget.left_bytes < 0:
            raise ResourceExhaustedError(
                f"{prober} has sent more than {HELD_BYTES >> 20} MiB of probes: try again",
                field="payload",
                reason="PROBES",
                retry_after_s=MOST_PAYLOAD_BYTES / BYTES_PER_S,
            )
