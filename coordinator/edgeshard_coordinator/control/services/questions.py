"""The questions to nodes that the state does not depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.control.commands import CommandResult
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.control.requests.models import Models
from edgeshard_coordinator.control.runtime.calls import MeasureCalls
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.services.dumping import Dumps
from edgeshard_coordinator.control.services.packed import Packed
from edgeshard_coordinator.control.services.tracing import Traces


@dataclass(slots=True)
class Questions:
    """The questions that may wait for nodes' answers, by their subject."""

    calls: MeasureCalls
    traces: Traces
    dumps: Dumps
    packed: Packed

    @classmethod
    def over(
        cls,
        loop: StateLoop,
        hub: ControlHub,
        calls: MeasureCalls,
        models: Models,
        about: Callable[[], dict[str, Any]],
    ) -> Questions:
        """Questions over the control streams of `hub`; `about` describes this process."""
        return cls(calls, Traces(loop, hub), Dumps(loop, hub, about), Packed(loop, hub, models))

    def answered(self, node_id: NodeId, result: CommandResult) -> bool:
        """Whether a node's answer to a command belonged to one of these questions, which has it then."""
        takers = (self.traces.answered, self.dumps.refused, self.packed.answered)
        return any(took(node_id, result) for took in takers)
