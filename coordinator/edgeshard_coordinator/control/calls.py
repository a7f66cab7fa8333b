"""Operators' calls to measure boxes: how far each box is, and who wants to hear of it.

A call outlives its caller: the boxes go on, and a repeat with the same operation id follows on. What a listener has not
read yet is one message for each box, its newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from edgeshard.commands import CommandProgress
from edgeshard.errors import EdgeShardError, ResourceExhaustedError
from edgeshard.ids import NodeId, NodeName, OperationId
from edgeshard_coordinator.core.jobs import Measured

MOST_CALLS = 64
"""Calls under way at most; and so many are kept, the finished ones for repeats of them."""


@dataclass(frozen=True, slots=True)
class BoxProgress:
    """How far a box is: `done` of `total`, and at what.

    `finished` in its last message, with the failure if any, and the boxes it could not measure its link to.
    """

    node: NodeName
    done: int = 0
    total: int = 0
    what: str = "waiting"
    finished: bool = False
    failure: EdgeShardError | None = None
    missed: tuple[NodeName, ...] = ()


@dataclass(slots=True, eq=False)
class _Listener:
    """`unread` are boxes of which there is news."""

    unread: dict[NodeId, None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class MeasureCall:
    """One call, and the newest of every box it has measured. `uid` begins the ids of its commands."""

    uid: str
    fingerprint: str
    boxes: dict[NodeId, BoxProgress]
    listeners: list[_Listener] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(box.finished for box in self.boxes.values())

    def tell(self, node_id: NodeId, progress: BoxProgress) -> None:
        self.boxes[node_id] = progress
        for listener in self.listeners:
            listener.unread[node_id] = None
            listener.wake.set()


class MeasureCalls:
    """Every method returns at once, but for `follow`."""

    def __init__(self) -> None:
        self._calls: dict[OperationId, MeasureCall] = {}
        self._closed: EdgeShardError | None = None

    def find(self, operation_id: OperationId) -> MeasureCall | None:
        return self._calls.get(operation_id)

    def begin(
        self, operation_id: OperationId, uid: str, fingerprint: str, boxes: Mapping[NodeId, NodeName]
    ) -> MeasureCall:
        """Keep a call, before its boxes are asked: their answers may be quick. The oldest finished ones give way.

        Raises ResourceExhaustedError when too many are under way.
        """
        finished = [key for key, known in self._calls.items() if known.finished]
        if len(self._calls) - len(finished) >= MOST_CALLS:
            raise ResourceExhaustedError(
                f"{MOST_CALLS} calls to measure boxes are under way; wait for one to end",
                reason="TOO_MANY_CALLS",
                retry_after_s=5.0,
            )
        for key in finished[: max(0, len(self._calls) + 1 - MOST_CALLS)]:
            del self._calls[key]
        call = MeasureCall(uid, fingerprint, {node_id: BoxProgress(name) for node_id, name in boxes.items()})
        self._calls[operation_id] = call
        return call

    def forget(self, operation_id: OperationId) -> None:
        """A call that was refused."""
        self._calls.pop(operation_id, None)

    def progress(self, node_id: NodeId, progress: CommandProgress) -> None:
        """A box's word on a command under way."""
        call = self._of(progress.operation_id.partition("/")[0])
        box = call.boxes.get(node_id) if call is not None else None
        if call is not None and box is not None and not box.finished:
            call.tell(node_id, replace(box, done=progress.done, total=progress.total, what=progress.what))

    def finished(self, measured: Measured) -> None:
        call = self._of(measured.uid)
        if call is not None:
            box = call.boxes[measured.node_id]
            done = box.total if measured.failure is None else box.done
            what = "measured" if measured.failure is None else box.what
            last = BoxProgress(box.node, done, box.total, what, True, measured.failure, measured.missed)
            call.tell(measured.node_id, last)

    async def follow(self, call: MeasureCall) -> AsyncGenerator[BoxProgress, None]:
        """Where each box is now and then whatever changes, until all are finished."""
        listener = _Listener(dict.fromkeys(call.boxes))
        call.listeners.append(listener)
        try:
            while True:
                while listener.unread:
                    node_id = next(iter(listener.unread))
                    del listener.unread[node_id]
                    yield call.boxes[node_id]
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
