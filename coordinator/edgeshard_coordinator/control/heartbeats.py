"""The heartbeats of all boxes, put together: from their control streams to the state in few events."""

from __future__ import annotations

import asyncio

from edgeshard.domain.commands import Heartbeat, HeartbeatChange
from edgeshard.domain.device import StageKey, StagePhase
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.domain.heartbeats import with_change
from edgeshard.domain.ids import Epoch
from edgeshard_coordinator.control.hub import ControlStream
from edgeshard_coordinator.control.loop import StateLoop
from edgeshard_coordinator.core.events import HeartbeatsReceived

TOGETHER_S = 0.05
"""How long a heartbeat waits for others. News of a stage's phase does not wait."""


class HeartbeatBatches:
    """Everything runs on the event loop's thread and returns at once. What waits is the newest of each stream."""

    def __init__(self, loop: StateLoop) -> None:
        self._loop = loop
        self._waiting: dict[ControlStream, Heartbeat] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def heard(self, stream: ControlStream, said: Heartbeat | HeartbeatChange) -> None:
        """Raises InvalidArgumentError for what no agent says; the stream is of no use then."""
        before = stream.heartbeat
        now = stream.heartbeat = _whole(stream, said)
        self._waiting[stream] = now
        if _is_news(before, now):
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Post what waits. A box that the state does not know any more has its stream ended: it registers again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        known = tuple(heartbeat for stream, heartbeat in waiting.items() if self._is_current(stream))
        if known:
            self._loop.post(HeartbeatsReceived(known, self._loop.now()))

    def flush_of(self, stream: ControlStream) -> None:
        """Before anything else that the box says is posted, so that the order is the box's own."""
        if stream in self._waiting:
            self.flush()

    def forget(self, stream: ControlStream) -> None:
        """The stream has ended."""
        self._waiting.pop(stream, None)

    def _is_current(self, stream: ControlStream) -> bool:
        node = self._loop.state.nodes.get(stream.node_id)
        if node is None or node.incarnation != stream.incarnation:
            stream.fail(NotFoundError("node_id: this box is not registered any more; register again", field="node_id"))
            return False
        return node.connection == stream.number


def _whole(stream: ControlStream, said: Heartbeat | HeartbeatChange) -> Heartbeat:
    if isinstance(said, Heartbeat):
        if (said.node_id, said.incarnation) != (stream.node_id, stream.incarnation):
            raise InvalidArgumentError("node_id: a heartbeat is of the box whose stream it comes on", field="node_id")
        return said
    if stream.heartbeat is None:
        raise InvalidArgumentError("heartbeat_change: the first heartbeat of a stream is whole", field="heartbeat")
    return with_change(stream.heartbeat, said)


def _is_news(before: Heartbeat | None, now: Heartbeat) -> bool:
    """Whether a stage is new, gone, at another epoch or in another phase."""
    if before is None or before.stages is now.stages:
        return before is None and bool(now.stages)
    return _phases(before) != _phases(now)


def _phases(heartbeat: Heartbeat) -> dict[StageKey, tuple[Epoch, StagePhase]]:
    return {stage.key: (stage.epoch, stage.phase) for stage in heartbeat.stages}
