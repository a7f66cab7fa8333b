"""The nodes' reports on their machines. They decide nothing, so they are kept apart from the
state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.device import Condition, Node
from edgeshard.process.machine_facts import utc_s

TWIN_KEPT_S = 120.0
"""Seconds that a twin is shown after its last try. Agents try at least every half minute."""
TWIN_QUIET_S = 60.0
"""Seconds between two lines of the log about one twin."""


@dataclass(slots=True)
class _Twin:
    """A process with the identity of a node that another process has."""

    address: str
    tried_at: float
    logged_at: float


class Conditions:
    """The newest of each node that is connected. `own` reads the coordinator's; `utc` is its wall
    clock, in seconds."""

    def __init__(
        self, own: Callable[[], Condition | None], utc: Callable[[], float] = utc_s
    ) -> None:
        self.own = own
        self._utc = utc
        self._twins: dict[NodeId, _Twin] = {}
        self._known: dict[NodeId, tuple[int, Condition]] = {}

    def came(self, node_id: NodeId, connection: int, condition: Condition) -> None:
        """A node reports it now over this connection; its travel time is negligible."""
        ahead_s = condition.utc_s - self._utc() if condition.utc_s else 0.0
        self._known[node_id] = connection, replace(condition, clock_ahead_s=ahead_s)

    def left(self, node_id: NodeId, connection: int) -> None:
        """Forget the words of a connection that ended, unless a newer one has taken its place."""
        if node_id in self._known and self._known[node_id][0] == connection:
            del self._known[node_id]

    def of(self, node_id: NodeId) -> Condition | None:
        return self._known[node_id][1] if node_id in self._known else None

    def twin_came(self, node_id: NodeId, address: str) -> bool:
        """A second process with the identity of a node was refused. Return whether to log it."""
        now = self._utc()
        self._twins = {
            other: twin for other, twin in self._twins.items() if now - twin.tried_at < TWIN_KEPT_S
        }
        twin = self._twins.get(node_id)
        if twin is None:
            self._twins[node_id] = _Twin(address, now, now)
            return True
        twin.address = address
        twin.tried_at = now
        if now - twin.logged_at < TWIN_QUIET_S:
            return False
        twin.logged_at = now
        return True

    def twin_of(self, node_id: NodeId) -> str:
        """The address of a recent second process with the identity of a node; "" if there was
        none."""
        twin = self._twins.get(node_id)
        return (
            twin.address if twin is not None and self._utc() - twin.tried_at < TWIN_KEPT_S else ""
        )

    def with_condition(self, node: Node) -> Node:
        """The node with its condition and its twin."""
        condition = self.of(node.node_id) if node.connected else None
        return replace(node, condition=condition, twin_address=self.twin_of(node.node_id))
