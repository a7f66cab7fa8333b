"""The service that operators call through edgectl, with its calls about stored models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from edgeshard.domain.audit import MOST_ENTRIES
from edgeshard.domain.control.site import MOST_EVENTS, StoredModel
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from edgeshard.domain.ids import DeploymentName, OperationId
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.nodes.profile import config_hash
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.debug import dump_messages
from edgeshard.wire.site import (
    audit_checks_to_wire,
    audit_entry_to_wire,
    site_event_to_wire,
    stored_model_to_wire,
    trace_to_wire,
)
from edgeshard_coordinator.control.persistence.operations import answered
from edgeshard_coordinator.control.requests.site_models import stored_model
from edgeshard_coordinator.control.services.admin_calls import AdminCalls
from edgeshard_coordinator.control.services.admin_deployments import DeploymentAdminCalls
from edgeshard_coordinator.control.services.admin_nodes import NodeCalls
from edgeshard_coordinator.core.values.events import ModelDeleted
from edgeshard_coordinator.core.values.state import ServedOperation


class ModelCalls(AdminCalls):
    """Models that the site stores."""

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        def stored() -> list[StoredModel]:
            manifests = self._models.list()
            return [
                stored_model(manifest, digest, self._models.weights_files(manifest))
                for manifest, digest in manifests
            ]

        models = await asyncio.to_thread(stored)  # it looks at files, perhaps of a slow disk
        return pb.ListModelsResponse(models=[stored_model_to_wire(model) for model in models])

    async def DeleteModel(
        self, request: pb.DeleteModelRequest, context: Any
    ) -> pb.DeleteModelResponse:
        async def work(operation: ServedOperation) -> bytes:
            # Models are files, and not in one transaction with operations. If a repeat finds the
            # model gone, it must know that the first call began, and was not answered before the
            # coordinator ended.
            begun = replace(operation, operation_id=OperationId(f"{operation.operation_id}/begun"))
            repeated = await answered(self._store.find_operation(begun.operation_id)) is not None
            async with self._model_lock:
                try:
                    shape = config_hash(self._check_unused(request.name).config)
                    if not repeated:
                        await answered(self._store.save_operation(begun))
                    await asyncio.to_thread(self._models.delete, request.name)
                    if all(
                        config_hash(manifest.config) != shape for manifest, _ in self._models.list()
                    ):
                        self._loop.post(ModelDeleted(shape, self._loop.now()))
                except NotFoundError:
                    if not repeated:
                        raise
            await answered(self._store.save_operation(operation))
            return operation.outcome

        outcome = await self.operations.once(request.operation_id, request, work)
        return pb.DeleteModelResponse.FromString(outcome)

    def _check_unused(self, name: str) -> ModelManifest:
        manifest, digest = self._models.get(name)
        for record in self._loop.state.deployments.values():
            draft = record.placement.draft
            drafts = draft is not None and digest == draft.manifest_digest
            if record.model == name or record.manifest_digest == digest or drafts:
                raise FailedPreconditionError(
                    f"name: model {name} is used by deployment {record.name}; delete that first",
                    field="name",
                    reason="MODEL_IN_USE",
                )
        return manifest


class AdminServicer(NodeCalls, ModelCalls, DeploymentAdminCalls):
    """The admin service: traces, dumps, the audit log and events here, the other subjects in its
    bases."""

    async def Trace(
        self, request: pb.TraceRequest, context: Any
    ) -> AsyncIterator[pb.TraceResponse]:
        for trace in await self._questions.traces.take(
            DeploymentName(request.deployment), request.seconds
        ):
            yield pb.TraceResponse(stage=trace_to_wire(trace))

    async def Dump(self, request: pb.DumpRequest, context: Any) -> AsyncIterator[pb.DumpResponse]:
        async with aclosing(self._questions.dumps.take()) as dumps:
            async for dump in dumps:
                for message in dump_messages(dump):
                    yield message

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditResponse:
        if not 1 <= request.limit <= MOST_ENTRIES:
            raise InvalidArgumentError(
                f"limit must be 1 to {MOST_ENTRIES}, not {request.limit}", field="limit"
            )
        checks = audit_checks_to_wire(await self._audit.check()) if request.verify else None
        entries = await self._audit.newest(request.limit)
        return pb.ListAuditResponse(
            entries=[audit_entry_to_wire(entry) for entry in entries], checks=checks
        )

    async def ListEvents(
        self, request: pb.ListEventsRequest, context: Any
    ) -> AsyncIterator[pb.ListEventsResponse]:
        if request.limit > MOST_EVENTS:
            raise InvalidArgumentError(
                f"limit must be at most {MOST_EVENTS}, not {request.limit}", field="limit"
            )
        if not request.follow:
            for event in self._events.newest(request.limit):
                yield pb.ListEventsResponse(event=site_event_to_wire(event))
            return
        async with aclosing(self._events.follow(request.limit)) as events:
            async for event in events:
                yield pb.ListEventsResponse(event=site_event_to_wire(event))
