"""The control streams of connected nodes, and requests over them whose answers do not change the
state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgeshard.domain.control.commands import ControlMessage, Heartbeat
from edgeshard.domain.errors import (
    DeadlineError,
    EdgeShardError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, OperationId
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.values.state import KnownNode

MAX_UNREAD = 1024
"""Commands that wait for a node to read them. A node has a few for each of its stages."""


@dataclass(slots=True, eq=False)
class ControlStream:
    """One node's control stream: the messages to the node, and its newest heartbeat.

    `outgoing` ends with None, or with the error that ends the stream.
    """

    node_id: NodeId
    incarnation: str
    number: int
    outgoing: asyncio.Queue[tuple[OperationId, ControlMessage] | EdgeShardError | None] = field(
        default_factory=asyncio.Queue
    )
    heartbeat: Heartbeat | None = None

    def send(self, operation_id: OperationId, command: ControlMessage) -> None:
        """Put a command on the stream. A stream that its node does not read ends; the node gets on
        the next one what counts then."""
        unread = self.outgoing.qsize()
        if unread < MAX_UNREAD:
            self.outgoing.put_nowait((operation_id, command))
        elif unread == MAX_UNREAD:
            self.fail(
                ResourceExhaustedError(
                    f"the node left {unread} commands unread on its stream; connect again, and "
                    "look at the node's load",
                    reason="SLOW_READER",
                )
            )

    def close(self) -> None:
        self.outgoing.put_nowait(None)

    def fail(self, error: EdgeShardError) -> None:
        """End the stream; the agent gets the error as its status."""
        self.outgoing.put_nowait(error)


class ControlHub:
    """At most one stream for each node: a newer one closes the older."""

    def __init__(self) -> None:
        self._connections: dict[NodeId, ControlStream] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._connections)

    def open(self, node_id: NodeId, incarnation: str) -> ControlStream:
        self._last_number += 1
        older = self._connections.get(node_id)
        if older is not None:
            older.close()
        connection = self._connections[node_id] = ControlStream(
            node_id, incarnation, self._last_number
        )
        return connection

    def discard(self, connection: ControlStream) -> None:
        """Forget a stream that ended."""
        if self._connections.get(connection.node_id) is connection:
            del self._connections[connection.node_id]

    def send(
        self, node_id: NodeId, number: int, operation_id: OperationId, command: ControlMessage
    ) -> None:
        """Put a command on the stream numbered `number`; when it is gone the command is sent again
        on the next."""
        connection = self._connections.get(node_id)
        if connection is not None and connection.number == number:
            connection.send(operation_id, command)

    def fail(self, node_id: NodeId, error: EdgeShardError) -> None:
        """End a node's stream with an error, which the node gets as its status."""
        connection = self._connections.get(node_id)
        if connection is not None:
            connection.fail(error)

    def tell_all(self, operation_id: OperationId, command: ControlMessage) -> None:
        for connection in self._connections.values():
            connection.send(operation_id, command)

    def close(self, node_id: NodeId, number: int) -> None:
        connection = self._connections.get(node_id)
        if connection is not None and connection.number == number:
            connection.close()

    def close_all(self) -> None:
        for connection in self._connections.values():
            connection.close()


AnswerT = TypeVar("AnswerT")


class NodeRequests:
    """Sends a node a command over the control stream that it has now. `what` names an answer in
    errors."""

    def __init__(self, loop: StateLoop, hub: ControlHub, limit_s: float, what: str) -> None:
        self._loop = loop
        self._hub = hub
        self._limit_s = limit_s
        self._what = what

    def check_there(self, node: KnownNode) -> None:
        """Raise UnavailableError for a node that is not connected, or not any more as `node` has
        it."""
        if self._is_gone(node):
            raise UnavailableError("the node is not connected", reason="NODE_AWAY")

    async def answer(
        self,
        node: KnownNode,
        operation_id: OperationId,
        command: ControlMessage,
        answer: asyncio.Future[AnswerT],
    ) -> AnswerT:
        """The result of `answer`, which the listener to the node resolves.

        Raises UnavailableError when the node goes away, DeadlineError when it stays silent, and the
        error of `answer`.
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
                raise UnavailableError(
                    "the node disconnected before it answered", reason="NODE_LOST"
                )
            raise DeadlineError(
                f"no {self._what} arrived within {self._limit_s:g} s", reason="NO_ANSWER"
            )
        finally:
            answer.cancel()
            departure.cancel()
            await asyncio.gather(answer, departure, return_exceptions=True)

    def _is_gone(self, node: KnownNode) -> bool:
        now = self._loop.state.nodes.get(node.node_id)
        return now is None or not now.connected or now.connection != node.connection
