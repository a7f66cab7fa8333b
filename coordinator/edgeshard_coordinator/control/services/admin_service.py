"""The service that operators call through edgectl."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from edgeshard.domain.audit import MOST_ENTRIES
from edgeshard.domain.control.site import MOST_EVENTS
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.debug import dump_messages
from edgeshard.wire.site import audit_checks_to_wire, audit_entry_to_wire, site_event_to_wire, trace_to_wire
from edgeshard_coordinator.control.services.admin_deployments import DeploymentAdminCalls
from edgeshard_coordinator.control.services.admin_models import ModelCalls
from edgeshard_coordinator.control.services.admin_nodes import NodeCalls


class AdminServicer(NodeCalls, ModelCalls, DeploymentAdminCalls):
    """The admin service: traces, dumps, the audit log and events here, the other subjects in its bases."""

    async def Trace(self, request: pb.TraceRequest, context: Any) -> AsyncIterator[pb.TraceResponse]:
        for trace in await self._questions.traces.take(DeploymentName(request.deployment), request.seconds):
            yield pb.TraceResponse(stage=trace_to_wire(trace))

    async def Dump(self, request: pb.DumpRequest, context: Any) -> AsyncIterator[pb.DumpResponse]:
        async with aclosing(self._questions.dumps.take()) as dumps:
            async for dump in dumps:
                for message in dump_messages(dump):
                    yield message

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditResponse:
        if not 1 <= request.limit <= MOST_ENTRIES:
            raise InvalidArgumentError(f"limit must be 1 to {MOST_ENTRIES}, not {request.limit}", field="limit")
        checks = audit_checks_to_wire(await self._audit.check()) if request.verify else None
        entries = await self._audit.newest(request.limit)
        return pb.ListAuditResponse(entries=[audit_entry_to_wire(entry) for entry in entries], checks=checks)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> AsyncIterator[pb.ListEventsResponse]:
        if request.limit > MOST_EVENTS:
            raise InvalidArgumentError(f"limit must be at most {MOST_EVENTS}, not {request.limit}", field="limit")
        if not request.follow:
            for event in self._events.newest(request.limit):
                yield pb.ListEventsResponse(event=site_event_to_wire(event))
            return
        async with aclosing(self._events.follow(request.limit)) as events:
            async for event in events:
                yield pb.ListEventsResponse(event=site_event_to_wire(event))
