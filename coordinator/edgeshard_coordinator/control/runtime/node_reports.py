"""Reports of nodes on their way to the state: heartbeats of all nodes in few events, the bound on
registrations, and the check of profiles off the event loop.

A message is kept unread until its turn: reading many in a row costs a fraction of reading each on
arrival, with cold caches.
"""

from __future__ import annotations

import asyncio

from edgeshard.domain.control.commands import Heartbeat, HeartbeatChange, ProfileReport, with_change
from edgeshard.domain.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.wire.control import agent_message_from_wire, is_urgent
from edgeshard_coordinator.control.runtime.hub import ControlStream
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.solver import Solver
from edgeshard_coordinator.core.values.events import HeartbeatsReceived
from edgeshard_coordinator.core.values.measurements import check_profile
from edgeshard_coordinator.core.values.token_bucket import TokenBucket


class ProfileChecks:
    """At most one report of a node is checked or waits, and one report of all is checked at a
    time."""

    def __init__(self) -> None:
        self._solver = Solver()
        self._turn = asyncio.Lock()
        self._nodes: set[NodeId] = set()

    async def run(self, report: ProfileReport) -> None:
        """Raises InvalidArgumentError for a profile without times of some part of a model,
        UnavailableError while an earlier report of the node is checked."""
        if report.node_id in self._nodes:
            raise UnavailableError(
                "node_id: an earlier profile of this node is still being checked; report again",
                field="node_id",
                reason="PROFILE_UNDER_CHECK",
                retry_after_s=1.0,
            )
        self._nodes.add(report.node_id)
        try:
            async with self._turn:
                await self._solver.run(lambda: _check(report))
        finally:
            self._nodes.discard(report.node_id)


def _check(report: ProfileReport) -> None:
    for profile in report.compute:
        check_profile(profile)


RATE = 1.0
"""Registrations of one node a second, in the long run. A node registers when it starts and when it
reconnects."""
BURST_S = 20.0
MAX_NAMES = 4096
"""Names that are remembered, those seen first go first; without certificates anyone may invent
some."""


class Registrations:
    """The registrations of the last seconds, by the node's name."""

    def __init__(self) -> None:
        self._buckets: dict[NodeName, TokenBucket] = {}

    def take(self, name: NodeName, now: float) -> None:
        """Count a registration at `now`. Raises ResourceExhaustedError naming `name` for one too
        many."""
        bucket = self._buckets.get(name, TokenBucket(RATE, BURST_S))
        debt_s = bucket.debt_s(now)
        if debt_s > 0:
            raise ResourceExhaustedError(
                f"name: node {name} registers too often; register again after {debt_s:.1f} s",
                field="name",
                reason="TOO_MANY_REGISTRATIONS",
                retry_after_s=debt_s,
            )
        if len(self._buckets) >= MAX_NAMES:
            busy = {
                other_name: other
                for other_name, other in self._buckets.items()
                if not other.is_full(now)
            }
            newest = list(busy.items())[-(MAX_NAMES // 2) :]
            self._buckets = dict(newest)
        self._buckets[name] = bucket.charged(1.0, now)


TOGETHER_S = 0.07
"""Seconds that a heartbeat waits for others. News of a stage does not wait."""
MAX_WAITING_BYTES = 128 << 10
"""Most bytes of messages that wait: more are read at once, so that reading them together takes no
longer."""


class HeartbeatBatches:
    """Everything runs on the event loop's thread and returns at once."""

    def __init__(self, loop: StateLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[ControlStream, pb.ControlRequest]] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def heard(self, stream: ControlStream, message: pb.ControlRequest) -> None:
        """Take a message with a heartbeat. One that no agent would send ends its stream in its
        turn."""
        self._waiting.append((stream, message))
        self._waiting_bytes += message.ByteSize()
        if is_urgent(message) or self._waiting_bytes > MAX_WAITING_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Post the newest heartbeat of each stream that has not ended.

        A stream that is no longer the node's own is ended, and the node registers again. The cause
        is that the state does not know it, or that a late registration of an earlier process of it
        took its place.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        newest: dict[ControlStream, Heartbeat] = {}
        for stream, message in waiting:
            try:
                stream.heartbeat = newest[stream] = whole(stream, message)
            except InvalidArgumentError as error:
                stream.fail(error)
        heartbeats = tuple(
            heartbeat for stream, heartbeat in newest.items() if self._is_current(stream)
        )
        if heartbeats:
            self._loop.post(HeartbeatsReceived(heartbeats, self._loop.now()))

    def flush_of(self, stream: ControlStream) -> None:
        """Post the heartbeats of a stream before another message of its node is posted, so that the
        order is the node's own."""
        if any(waiting is stream for waiting, _ in self._waiting):
            self.flush()

    def _is_current(self, stream: ControlStream) -> bool:
        node = self._loop.state.nodes.get(stream.node_id)
        if node is not None and (node.incarnation, node.connection) == (
            stream.incarnation,
            stream.number,
        ):
            return True
        stream.fail(
            NotFoundError(
                "node_id: this node is not registered any more; register again", field="node_id"
            )
        )
        return False


def whole(stream: ControlStream, message: pb.ControlRequest) -> Heartbeat:
    """The whole heartbeat after a message. Raises InvalidArgumentError for one that no agent
    sends."""
    agent_message = agent_message_from_wire(message)
    if isinstance(agent_message, Heartbeat):
        if (agent_message.node_id, agent_message.incarnation) != (
            stream.node_id,
            stream.incarnation,
        ):
            raise InvalidArgumentError(
                "node_id: the heartbeat names another node than its stream", field="node_id"
            )
        return agent_message
    if stream.heartbeat is None or not isinstance(agent_message, HeartbeatChange):
        raise InvalidArgumentError(
            "heartbeat: the first heartbeat of a stream must be complete", field="heartbeat"
        )
    return with_change(stream.heartbeat, agent_message)
