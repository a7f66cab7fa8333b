"""The nodes' words on their machines. Nothing is decided from them, so they are kept beside the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.condition import Condition
from edgeshard.domain.nodes.device import Node
from edgeshard.process.machine import utc_s


class Conditions:
    """The newest of each node that is connected. `own` reads the coordinator's; `utc` is its wall clock, in seconds."""

    def __init__(self, own: Callable[[], Condition | None], utc: Callable[[], float] = utc_s) -> None:
        self.own = own
        self._utc = utc
        self._known: dict[NodeId, tuple[int, Condition]] = {}

    def came(self, node_id: NodeId, connection: int, condition: Condition) -> None:
        """A node says it now over this connection; on its way it took next to nothing."""
        ahead_s = condition.utc_s - self._utc() if condition.utc_s else 0.0
        self._known[node_id] = connection, replace(condition, clock_ahead_s=ahead_s)

    def left(self, node_id: NodeId, connection: int) -> None:
        """Forget the words of a connection that ended, unless a newer one has taken its place."""
        if node_id in self._known and self._known[node_id][0] == connection:
            del self._known[node_id]

    def of(self, node_id: NodeId) -> Condition | None:
        return self._known[node_id][1] if node_id in self._known else None

    def with_condition(self, node: Node) -> Node:
        condition = self.of(node.node_id) if node.connected else None
        return node if condition is None else replace(node, condition=condition)
