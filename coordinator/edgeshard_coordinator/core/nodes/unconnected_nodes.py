"""The bound on the number of nodes: whoever may register could fill the memory otherwise.

A node that registers dials its control stream at once. A node without such a stream is unconnected:
it holds nothing, is in no placement and is not on disk, so it is forgotten without a trace. It
registers again if it connects later.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import NodeId
from edgeshard.planning.inputs.devices import MAX_NODES
from edgeshard_coordinator.core.nodes import lost_nodes
from edgeshard_coordinator.core.values.measurements import without_nodes
from edgeshard_coordinator.core.values.state import State

MOST_UNCONNECTED = 1024
"""Nodes of a large site may all register before the first of them connects."""


def with_room(state: State, node_id: NodeId) -> State:
    """Make a place for a node that registers: the oldest unconnected ones are removed, so that a
    real node is never refused for them.

    Raises ResourceExhaustedError if there are as many nodes as a site may have.
    """
    if node_id in state.nodes:
        return state
    unconnected = sorted(
        (node.heard_at, node.node_id) for node in state.nodes.values() if not node.joined
    )
    if len(state.nodes) - len(unconnected) >= MAX_NODES:
        raise ResourceExhaustedError(
            f"node_id: {MAX_NODES} nodes are registered, the limit of a site; if most of them are "
            "gone "
            "for good, start a coordinator with another --state-dir",
            field="node_id",
            reason="TOO_MANY_NODES",
        )
    return without(
        state,
        {
            unconnected
            for _, unconnected in unconnected[: max(0, len(unconnected) + 1 - MOST_UNCONNECTED)]
        },
    )


def forgotten(state: State, now: float) -> State:
    """The state without unconnected nodes that had their time to connect."""
    limit_s = state.timings.unconnected_s
    late = {
        node.node_id
        for node in state.nodes.values()
        if not node.joined and now - node.heard_at > limit_s
    }
    return without(state, late)


def without(state: State, node_ids: Collection[NodeId]) -> State:
    """The state without nodes that are not connected, and without measurements of them."""
    if not node_ids:
        return state
    nodes = {node_id: node for node_id, node in state.nodes.items() if node_id not in node_ids}
    retakes = tuple(item for item in state.retakes if item.node_id not in node_ids)
    tries = {
        node_id: node_tries
        for node_id, node_tries in state.profile_tries.items()
        if node_id not in node_ids
    }
    state = replace(
        state,
        nodes=nodes,
        measured=without_nodes(state.measured, node_ids),
        retakes=retakes,
        profile_tries=tries,
    )
    return lost_nodes.not_awaited(state, node_ids)
