"""Operators' calls to measure nodes: how far each node is, and who listens.

A call outlives its caller: the nodes continue, and a repeated call with the same operation id
listens again. A listener has at most one unread message of each node, the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from edgeshard.domain.control.commands import CommandKey, CommandProgress
from edgeshard.domain.control.site import NodeProgress
from edgeshard.domain.errors import EdgeShardError, ResourceExhaustedError
from edgeshard.domain.ids import NodeId, NodeName, OperationId
from edgeshard_coordinator.core.values.jobs import Measured

MOST_CALLS = 64
"""Most calls under way, and most finished calls kept for repeats of them."""


@dataclass(slots=True, eq=False)
class _Listener:
    """`unread` are nodes of which there is news."""

    unread: dict[NodeId, None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class MeasureCall:
    """One call, and the newest message of every node it has measured. `uid` begins the ids of its
    commands."""

    uid: str
    fingerprint: str
    nodes: dict[NodeId, NodeProgress]
    listeners: list[_Listener] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(node.finished for node in self.nodes.values())

    def tell(self, node_id: NodeId, progress: NodeProgress) -> None:
        self.nodes[node_id] = progress
        for listener in self.listeners:
            listener.unread[node_id] = None
            listener.wake.set()


class MeasureCalls:
    """Every method except `follow` returns at once."""

    def __init__(self) -> None:
        self._calls: dict[OperationId, MeasureCall] = {}
        self._closed: EdgeShardError | None = None

    def find(self, operation_id: OperationId) -> MeasureCall | None:
        return self._calls.get(operation_id)

    def begin(
        self,
        operation_id: OperationId,
        uid: str,
        fingerprint: str,
        nodes: Mapping[NodeId, NodeName],
    ) -> MeasureCall:
        """Keep a call before its nodes are queried: their answers may be quick. The oldest finished
        calls are dropped.

        Raises ResourceExhaustedError when too many are under way.
        """
        finished = [key for key, other in self._calls.items() if other.finished]
        if len(self._calls) - len(finished) >= MOST_CALLS:
            raise ResourceExhaustedError(
                f"{MOST_CALLS} calls to measure nodes are under way; wait for one to end",
                reason="TOO_MANY_CALLS",
                retry_after_s=5.0,
            )
        for key in finished[: max(0, len(self._calls) + 1 - MOST_CALLS)]:
            del self._calls[key]
        call = MeasureCall(
            uid, fingerprint, {node_id: NodeProgress(name) for node_id, name in nodes.items()}
        )
        self._calls[operation_id] = call
        return call

    def forget(self, operation_id: OperationId) -> None:
        """A call that was refused."""
        self._calls.pop(operation_id, None)

    def progress(self, node_id: NodeId, progress: CommandProgress) -> None:
        """A node's word on a command under way. Raises InvalidArgumentError for an operation id
        that is no command's."""
        call = self._of(CommandKey.parse(progress.operation_id).uid)
        node = call.nodes.get(node_id) if call is not None else None
        if call is not None and node is not None and not node.finished:
            call.tell(
                node_id, replace(node, done=progress.done, total=progress.total, what=progress.what)
            )

    def finished(self, measured: Measured) -> None:
        call = self._of(measured.uid)
        if call is not None:
            node = call.nodes[measured.node_id]
            done = node.total if measured.failure is None else node.done
            what = "measured" if measured.failure is None else node.what
            last = NodeProgress(
                node.node, done, node.total, what, True, measured.failure, measured.missed
            )
            call.tell(measured.node_id, last)

    async def follow(self, call: MeasureCall) -> AsyncGenerator[NodeProgress, None]:
        """The progress of each node now, then each change, until all are finished."""
        listener = _Listener(dict.fromkeys(call.nodes))
        call.listeners.append(listener)
        try:
            while True:
                while listener.unread:
                    node_id = next(iter(listener.unread))
                    del listener.unread[node_id]
                    yield call.nodes[node_id]
                if call.finished:
                    return
                if self._closed is not None:
                    raise self._closed
                listener.wake.clear()
                await listener.wake.wait()
        finally:
            call.listeners.remove(listener)

    def close(self, failure: EdgeShardError) -> None:
        """End every listener's stream with `failure`."""
        self._closed = failure
        for call in self._calls.values():
            for listener in call.listeners:
                listener.wake.set()

    def _of(self, uid: str) -> MeasureCall | None:
        return next((call for call in self._calls.values() if call.uid == uid), None)
