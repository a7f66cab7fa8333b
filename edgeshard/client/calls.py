"""The common part of all calls of a client."""

from __future__ import annotations

import uuid
from typing import Any

from edgeshard.client.connection import Connection
from edgeshard.domain.clock import Clock
from edgeshard.domain.ids import OperationId
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.proto.v1.identity_pb2_grpc import IdentityServiceStub
from edgeshard.proto.v1.inference_pb2_grpc import InferenceServiceStub


class Calls:
    """A part of the client's calls, each bounded by `timeout_s` unless it has a bound of its own."""

    def __init__(self, connection: Connection, timeout_s: float, clock: Clock) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def target(self) -> str:
        return self._connection.target

    async def _admin(self, method: str, request: Any) -> Any:
        return await self._connection.call(AdminServiceStub, method, request, self._timeout_s)

    async def _identity(self, method: str, request: Any) -> Any:
        return await self._connection.call(IdentityServiceStub, method, request, self._timeout_s)

    async def _inference(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._connection.call(InferenceServiceStub, method, request, timeout_s)


def operation_id() -> OperationId:
    """A new one, for a call that changes something and may arrive twice."""
    return OperationId(uuid.uuid4().hex)
