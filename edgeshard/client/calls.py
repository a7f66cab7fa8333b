"""The common part of all calls of a client."""

from __future__ import annotations

import uuid
from typing import Any

from edgeshard.client.connection import Connection
from edgeshard.domain.clock import Clock
from edgeshard.domain.ids import OperationId


class Calls:
    """A part of the client's calls, each bounded by `timeout_s` but where it has a bound of its own."""

    def __init__(self, connection: Connection, timeout_s: float, clock: Clock) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def target(self) -> str:
        return self._connection.target

    async def _admin(self, method: str, request: Any) -> Any:
        return await self._connection.admin(method, request, self._timeout_s)


def operation_id() -> OperationId:
    """A new one, for a call that changes something and may arrive twice."""
    return OperationId(uuid.uuid4().hex)
