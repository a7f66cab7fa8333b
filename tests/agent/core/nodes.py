"""The start state of the core's tests: a node that can compute, and has reported it."""

from __future__ import annotations

from edgeshard_agent.core.node_state import AgentState

from edgeshard.domain.nodes.device import DeviceFacts

FACTS = DeviceFacts("cpu", "Test CPU", 4, 8 << 30, 4 << 30, False, "Linux")
STARTED = AgentState(facts=FACTS, reported=True)
