"""When a node that is away or silent counts as lost, and when the coordinator suspects itself.
Pure.

A node whose control stream ends is lost at once, and one that stays silent for
`Timings.heartbeat_timeout_s` too. If the coordinator may be the blind one, it first waits a lease
(`Timings.lease_s`) for nodes to return:

* after its own start, for the nodes that it knows from the disk;
* after it stood still, as ticks too far apart show;
* if more than half of the connected nodes vanish together, and at least three. A node whose process
  has been
replaced meanwhile does not count: its process ended.

A lost node in its lease is *awaited*: its deployments stay as they are. If the same process
connects again, nothing of them has changed; if another does, or the lease is over, they break.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from edgeshard.domain.control.commands import HOLDING_INTERVAL_S, IDLE_INTERVAL_S
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.core.values.state import KnownNode, State

TOGETHER_S = 2.0
"""Nodes that vanish within this many seconds vanish together."""
LEAST_VANISHED = 3
"""One or two nodes that vanish have a fault of their own, however few there are."""
MISSED_HEARTBEATS = 2
"""A node that has missed this many when another vanishes counts as vanishing with it: its stream's
end is only noticed later."""


def started(state: State, now: float) -> State:
    """The coordinator begins: the nodes of the state, none of which is connected yet, are
    awaited."""
    return _awaiting(state, state.nodes, now + state.timings.lease_s, now)


def noticed(state: State, now: float) -> State:
    """The state before an event at `now`: if nothing happened for too long, nodes are awaited;
    awaited nodes may time out."""
    if state.ticked_at is not None and now - state.ticked_at > state.timings.stall_s:
        state = _stood_still(state, now)
    if any(until <= now for until in state.awaited.values()):
        state = replace(
            state,
            awaited={node_id: until for node_id, until in state.awaited.items() if now < until},
        )
    return state


def on_ticked(state: State, now: float) -> State:
    """A tick at `now`. If most nodes fell silent, they get one more lease."""
    state = replace(state, ticked_at=now)
    if now < state.frozen_until:
        return state
    connected = [node for node in state.nodes.values() if node.connected]
    silent = {node.node_id for node in connected if is_silent(state, node) and not node.excused}
    return (
        frozen(_heard(state, silent, now), now) if too_many(len(silent), len(connected)) else state
    )


def is_silent(state: State, node: KnownNode) -> bool:
    """Whether a node is silent by the newest tick, never by a clock that ran on while the
    coordinator stood still."""
    return (
        state.ticked_at is not None
        and state.ticked_at - node.heard_at > state.timings.heartbeat_timeout_s
    )


def is_evicted(state: State, node: KnownNode) -> bool:
    """Whether the control stream of a node that is silent is to be closed now."""
    return (
        is_silent(state, node)
        and state.ticked_at is not None
        and state.ticked_at >= state.frozen_until
    )


def on_stream_ended(state: State, node_id: NodeId, now: float) -> State:
    """The control stream of a node, which is away in the state already, ended by itself."""
    if now < state.frozen_until:
        return _awaiting(state, (node_id,), state.frozen_until, now)
    recent = {other_id: at for other_id, at in state.vanished if now - at <= TOGETHER_S} | {
        node_id: now
    }
    state = replace(state, vanished=tuple(recent.items()))
    connected = [node for node in state.nodes.values() if node.connected]
    vanished = recent.keys() | {node.node_id for node in connected if _is_overdue(node, now)}
    nodes = recent.keys() | {node.node_id for node in connected}
    if not too_many(len(vanished), len(nodes)):
        return state
    state = frozen(state, now)
    away = [
        other_id
        for other_id in recent
        if other_id in state.nodes and not state.nodes[other_id].connected
    ]
    return _awaiting(state, away, state.frozen_until, now)


def not_awaited(state: State, node_ids: Collection[NodeId]) -> State:
    """The state in which nodes are not awaited: they are back, or another process is in their
    place."""
    if state.awaited.keys().isdisjoint(node_ids):
        return state
    others = {node_id: until for node_id, until in state.awaited.items() if node_id not in node_ids}
    return replace(state, awaited=others)


def died(state: State, node_id: NodeId) -> State:
    """The state after a node's process was replaced: it ended, and no other process was at
    fault."""
    vanished = tuple((other_id, at) for other_id, at in state.vanished if other_id != node_id)
    return not_awaited(replace(state, vanished=vanished), (node_id,))


def too_many(vanished_count: int, nodes: int) -> bool:
    """Whether too many of these nodes are gone or silent at once, so that the coordinator may be
    the blind one."""
    return vanished_count >= LEAST_VANISHED and 2 * vanished_count > nodes


def _is_overdue(node: KnownNode, now: float) -> bool:
    """Whether a node's heartbeats are overdue. A node that starts is late for reasons of its
    own."""
    return node.placeable and now - node.heard_at > MISSED_HEARTBEATS * heartbeat_interval_s(node)


def heartbeat_interval_s(node: KnownNode) -> float:
    """The longest time between two heartbeats of a node that is well, in seconds."""
    return HOLDING_INTERVAL_S if node.stages else IDLE_INTERVAL_S


def _stood_still(state: State, now: float) -> State:
    """The state after a standstill: no message was received meanwhile, so no node was silent."""
    connected = {node.node_id for node in state.nodes.values() if node.connected}
    state = frozen(_heard(replace(state, ticked_at=now), connected, now), now)
    return _awaiting(state, state.awaited, state.frozen_until, now)


def _heard(state: State, node_ids: Collection[NodeId], now: float) -> State:
    nodes = {
        node_id: replace(node, heard_at=now, excused=True) if node_id in node_ids else node
        for node_id, node in state.nodes.items()
    }
    return replace(state, nodes=nodes)


def frozen(state: State, now: float) -> State:
    """The state in which nodes get a lease to return, from now on."""
    return replace(state, frozen_until=max(state.frozen_until, now + state.timings.lease_s))


def _awaiting(state: State, node_ids: Iterable[NodeId], until: float, now: float) -> State:
    if until <= now:
        return state
    later = {node_id: max(until, state.awaited.get(node_id, until)) for node_id in node_ids}
    return replace(state, awaited={**state.awaited, **later})
