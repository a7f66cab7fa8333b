"""The coordinator's core without a site, for tests of the measurements that it orders."""

from __future__ import annotations

from typing import Any

from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.values.actions import (
    Action,
    SaveMeasurements,
    SendCommand,
    TellMeasured,
)
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    Event,
    MeasureRequested,
    NodeConnected,
    NodeRegistered,
    ProfileReported,
    Ticked,
)
from edgeshard_coordinator.core.values.jobs import Measured
from edgeshard_coordinator.core.values.state import State, Timings, validate_state

from edgeshard.domain.control.commands import (
    CommandResult,
    MeasureCompute,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.ids import NodeId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import Effort, LinkProfile, MeasuredLink

LINK = LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20)
COMPUTE = MeasureCompute({"model_type": "llama"}, DType.FLOAT32, effort=Effort.QUICK, again=False)


class Desk:
    """The core without a site: events go in, and the commands it sent wait for answers."""

    def __init__(self, make_registration: Any, names: str) -> None:
        self.make_registration = make_registration
        self.now = 100.0
        # No heartbeats here: no node counts as silent.
        self.state = State(instance="run", timings=Timings(heartbeat_timeout_s=1e9, lease_s=0.0))
        self.sent: list[SendCommand] = []
        self.told: list[Measured] = []
        self.saved: list[SaveMeasurements] = []
        self.connections = 0
        for name in names:
            self.connect(name)

    def feed(self, event: Event) -> None:
        self.state = apply(self.state, event)
        validate_state(self.state)
        while actions := reconcile(self.state, self.now):
            for action in actions:
                self.state = apply(self.state, ActionIssued(action, self.now))
                validate_state(self.state)
                self._keep(action)

    def _keep(self, action: Action) -> None:
        match action:
            case SendCommand():
                self.sent.append(action)
            case TellMeasured(measured):
                self.told.append(measured)
            case SaveMeasurements():
                self.saved.append(action)

    def connect(self, name: str, incarnation: str = "i1", **changes: Any) -> None:
        self.connections += 1
        self.feed(NodeRegistered(self.make_registration(name, incarnation, **changes), self.now))
        self.feed(NodeConnected(node(name), incarnation, self.connections, self.now))

    def wait(self, seconds: float, active_requests: int = 0) -> None:
        """Time goes by, tick by tick."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.feed(Ticked(self.now, active_requests))

    def ask(
        self,
        *names: str,
        uid: str = "call",
        compute: MeasureCompute | None = COMPUTE,
        every: bool = False,
    ) -> None:
        self.feed(
            MeasureRequested(uid, tuple(node(name) for name in names), compute, every, self.now)
        )

    def answer(self, reached: bool = True, failure: Any = None) -> SendCommand:
        """The oldest running command is done; a probe without `reached` brings no links."""
        action = self.sent.pop(0)
        if isinstance(action.command, ProbeLinks) and reached and failure is None:
            links = tuple(
                MeasuredLink(action.node_id, peer.node_id, LINK) for peer in action.command.peers
            )
            self.feed(ProfileReported(ProfileReport(action.node_id, links=links), self.now))
        self.feed(
            CommandAnswered(action.node_id, CommandResult(action.operation_id, failure), self.now)
        )
        return action

    def under_way(self) -> list[tuple[str, str]]:
        return [(action.node_id[-1], type(action.command).__name__) for action in self.sent]

    def links(self) -> int:
        return sum(len(known.links) for known in self.state.measured.values())


def node(name: str) -> NodeId:
    return NodeId(f"id-{name}")
