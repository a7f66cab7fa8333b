"""Waiting for a node's answer over its control stream, without touching the state."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from edgeshard.domain.control.commands import ControlMessage
from edgeshard.domain.errors import DeadlineError, UnavailableError
from edgeshard.domain.ids import OperationId
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.values.state import KnownNode

AnswerT = TypeVar("AnswerT")


class NodeRequests:
    """Sends a node a command over the control stream that it has now. `what` names an answer in errors."""

    def __init__(self, loop: StateLoop, hub: ControlHub, limit_s: float, what: str) -> None:
        self._loop = loop
        self._hub = hub
        self._limit_s = limit_s
        self._what = what

    def check_there(self, node: KnownNode) -> None:
        """Raise UnavailableError for a node that is not connected, or not any more as `node` has it."""
        if self._is_gone(node):
            raise UnavailableError("the node is not connected", reason="NODE_AWAY")

    async def answer(
        self, node: KnownNode, operation_id: OperationId, command: ControlMessage, answer: asyncio.Future[AnswerT]
    ) -> AnswerT:
        """The result of `answer`, which the listener to the node resolves.

        Raises UnavailableError when the node goes away, DeadlineError when it stays silent, and the error of `answer`.
        """
        self.check_there(node)
        self._hub.send(node.node_id, node.connection, operation_id, command)
        departure = asyncio.create_task(self._loop.until(lambda _: self._is_gone(node)))
        either: set[asyncio.Future[Any]] = {answer, departure}
        try:
            await asyncio.wait(either, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if departure.done():
                raise UnavailableError("the node disconnected before it answered", reason="NODE_LOST")
            raise DeadlineError(f"no {self._what} arrived within {self._limit_s:g} s", reason="NO_ANSWER")
        finally:
            answer.cancel()
            departure.cancel()
            await asyncio.gather(answer, departure, return_exceptions=True)

    def _is_gone(self, node: KnownNode) -> bool:
        now = self._loop.state.nodes.get(node.node_id)
        return now is None or not now.connected or now.connection != node.connection
