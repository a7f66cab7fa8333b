"""What applications call."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from edgeshard.architectures import parse_config
from edgeshard.domain.deployment import DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import RequestId, check_id
from edgeshard.domain.site import ServedModel
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.proto.v1 import inference_pb2_grpc
from edgeshard.wire.generation import event_to_wire, generate_request_from_wire
from edgeshard.wire.site import served_model_to_wire
from edgeshard_coordinator.control.loop import StateLoop
from edgeshard_coordinator.control.models import Models
from edgeshard_coordinator.control.requests import RequestFront
from edgeshard_coordinator.core.state import DeploymentRecord


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, loop: StateLoop, front: RequestFront, models: Models) -> None:
        self._loop = loop
        self._front = front
        self._models = models

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        wanted = generate_request_from_wire(request)
        request_id = RequestId(check_id(wanted.request_id or uuid.uuid4().hex, "request_id"))
        running = self._front.start(wanted.model, wanted.generation, request_id, client_of(context))
        # Disconnect, deadline and cancel alike end the call; so does its ordinary end, which changes nothing more.
        context.add_done_callback(lambda _: self._front.abandon(running))
        async for event in running.events():
            yield event_to_wire(event)

    async def Cancel(
        self, request: pb.InferenceServiceCancelRequest, context: Any
    ) -> pb.InferenceServiceCancelResponse:
        cancelled = self._front.cancel(RequestId(check_id(request.request_id, "request_id")))
        return pb.InferenceServiceCancelResponse(cancelled=cancelled)

    async def ListModels(
        self, request: pb.InferenceServiceListModelsRequest, context: Any
    ) -> pb.InferenceServiceListModelsResponse:
        ready = [r for r in self._loop.state.deployments.values() if r.phase is DeploymentPhase.READY]
        served = [ServedModel(record.name, record.model, self._max_context(record)) for record in ready]
        return pb.InferenceServiceListModelsResponse(models=[served_model_to_wire(model) for model in served])

    def _max_context(self, record: DeploymentRecord) -> int:
        if record.spec.max_context:
            return record.spec.max_context
        try:
            manifest, _ = self._models.get(record.manifest_digest)
        except EdgeShardError:
            return 0  # Its manifest is damaged; the boxes still serve what they loaded.
        return parse_config(manifest.config).max_context


def client_of(context: Any) -> str:
    """The caller: the common name of its certificate, '' in plaintext, where callers cannot be told apart."""
    names = context.auth_context().get("x509_common_name", ())
    return names[0].decode("utf-8", "replace") if names else ""
