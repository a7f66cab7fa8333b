"""Words for states."""

from __future__ import annotations

from edgeshard.domain.nodes.device import Node


def node_status(node: Node) -> str:
    if not node.connected:
        return "away"
    return "starting" if node.starting else "connected"
