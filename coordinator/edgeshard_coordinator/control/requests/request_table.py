"""The requests that run or wait, and the entries in the books when one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import FinishReason
from edgeshard_coordinator.control.requests.resumptions import ResumptionBook, Standing
from edgeshard_coordinator.control.requests.running_request import RunningRequest


class RequestTable(dict[RequestId, RunningRequest]):
    """The requests by id, in the order of their arrival. `now` returns seconds of a steady
    clock."""

    def __init__(self, resumptions: ResumptionBook, now: Callable[[], float]) -> None:
        super().__init__()
        self._resumptions = resumptions
        self._now = now
        self.occupied = asyncio.Event()
        """Set while there are requests, so that an idle coordinator need not check them."""

    def of(self, deployment: DeploymentName) -> list[RunningRequest]:
        """The deployment's requests, in the order of their arrival."""
        return [request for request in self.values() if request.deployment == deployment]

    def of_client(self, client: str) -> list[RunningRequest]:
        return [request for request in self.values() if request.client == client]

    def add(self, request: RunningRequest) -> None:
        self[request.request_id] = request
        self._resumptions.returned(request.request_id)
        self.occupied.set()

    def end(self, request: RunningRequest, error: EdgeShardError) -> None:
        """Take it out, with `error` as the end of its client's stream."""
        self.remove(request)
        request.times.failed(error)
        request.fail(error)

    def leave(self, request: RunningRequest) -> None:
        """Remove a request that no client waits for any more."""
        request.times.finished(FinishReason.CANCELLED, self._now())
        self.remove(request, left=True)

    def remove(self, request: RunningRequest, *, left: bool = False) -> None:
        """Remove it, here and at its head's stream; its client may resume it. `left` is True if its
        client does not wait any more."""
        if request.attachment is not None:
            request.attachment.requests.pop(request.request_id, None)
        if self.get(request.request_id) is request:
            del self[request.request_id]
            # A request that no head confirmed gains nothing by having waited here.
            if request.standing is not Standing.AWAITING:
                self._resumptions.ended(
                    request.request_id,
                    request.claim,
                    is_charged=request.is_charged,
                    is_spent=request.is_back,
                )
            elif left:
                self._resumptions.left(request.request_id, request.claim)
            if not self:
                self.occupied.clear()
