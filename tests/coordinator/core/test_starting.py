"""Nodes that have joined and still import what computes: known, shown, and left out until they say
that they can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record, restored_record
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.profiling.measuring import chosen_nodes
from edgeshard_coordinator.core.values.actions import SaveNode, SendCommand
from edgeshard_coordinator.core.values.events import (
    DeployRequested,
    Event,
    HeartbeatsReceived,
    MeasureRequested,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
    Ticked,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    ServedOperation,
    State,
    node_view,
    validate_state,
)

from edgeshard.cli.render.views import node_fields
from edgeshard.domain.control.commands import Heartbeat, ProfileReport
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.errors import AbortedError, ResourceExhaustedError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, OperationId
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink
from edgeshard.views import node_status

TALE = DeploymentName("tale")
LINK = LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20)
QUIET = 100.0


class Desk:
    """Nodes that join and start, one event at a time; what must always hold is checked after
    each."""

    def __init__(self, make_registration: Any) -> None:
        self.make = make_registration
        self.state = State(instance="run")
        self.connections = 0
        self.now = 1.0

    def feed(self, event: Any) -> None:
        self.state = apply(self.state, event)
        validate_state(self.state)

    def register(self, name: str, starting: bool = True, **changes: Any) -> None:
        self.feed(NodeRegistered(self.make(name, starting=starting, **changes), self.now))

    def join(self, name: str, starting: bool = True, **changes: Any) -> None:
        self.register(name, starting, **changes)
        self.connections += 1
        incarnation = changes.get("incarnation", "i1")
        self.feed(NodeConnected(NodeId(f"id-{name}"), incarnation, self.connections, self.now))

    def node(self, name: str) -> Node:
        return node_view(self.state, self.state.nodes[NodeId(f"id-{name}")], self.now)

    def die(self, name: str) -> None:
        node = self.state.nodes[NodeId(f"id-{name}")]
        self.feed(NodeDisconnected(node.node_id, node.connection, self.now))


@pytest.fixture
def desk(make_registration: Any) -> Desk:
    return Desk(make_registration)


@pytest.fixture(scope="module")
def manifest(make_manifest: Callable[..., ModelManifest]) -> ModelManifest:
    return make_manifest()


def spec_of(**changes: Any) -> DeploymentSpec:
    return parse_spec(
        {"name": "tale", "model": "tiny", "source": "a", "dtype": "float32", **changes}
    )


def record_of(desk: Desk, manifest: ModelManifest, **changes: Any) -> DeploymentRecord:
    spec = spec_of(**changes)
    placement = PlanningPlacer().place(
        PlacementProblem(spec, manifest, desk.state.candidates(), desk.state.measured)
    )
    return DeploymentRecord("u1", spec, Digest("d" * 64), placement, Epoch(1))


def test_a_node_joins_then_starts_and_says_so_in_plain_words(desk: Desk) -> None:
    desk.join("a")
    assert node_status(desk.node("a")) == "starting" and not desk.node("a").placeable
    assert "it imports the compute libraries" in node_fields(desk.node("a"))["Status"]
    desk.register("a", starting=False)
    assert node_status(desk.node("a")) == "connected" and desk.node("a").placeable
    assert "nothing" not in node_fields(desk.node("a"))["Status"]


def test_the_report_may_come_before_the_stream(desk: Desk) -> None:
    desk.register("a")
    desk.register("a", starting=False)
    assert node_status(desk.node("a")) == "away"
    desk.feed(NodeConnected(NodeId("id-a"), "i1", 1, desk.now))
    assert desk.node("a").placeable


def test_a_node_that_dies_between_its_reports_is_away_and_starts_anew(desk: Desk) -> None:
    desk.join("a")
    desk.die("a")
    assert node_status(desk.node("a")) == "away"
    assert "nothing is placed" not in node_fields(desk.node("a"))["Status"]
    desk.join("a", incarnation="i2")
    assert node_status(desk.node("a")) == "starting"


def test_a_late_first_report_does_not_take_a_started_node_back(desk: Desk, make_facts: Any) -> None:
    desk.join("a", starting=False)
    desk.register("a", facts=make_facts(7))
    assert desk.node("a").placeable and desk.node("a").facts != make_facts(7)


def test_facts_while_it_starts_are_those_of_the_last_run(desk: Desk, make_facts: Any) -> None:
    """Incomplete facts must not drop measured times."""
    full, other = make_facts(), replace(make_facts(), model="another node")
    blank = replace(full, model="", memory_total_bytes=0, memory_budget_bytes=0)
    desk.join("a", facts=blank)
    assert desk.node("a").facts == blank
    desk.register("a", starting=False, facts=full)
    assert desk.node("a").facts == full
    assert any(isinstance(action, SaveNode) for action in reconcile(desk.state, desk.now))
    desk.die("a")
    desk.join("a", incarnation="i2", facts=blank)
    assert desk.node("a").facts == full
    desk.register("a", incarnation="i2", starting=False, facts=other)
    assert desk.node("a").facts == other


def test_a_placement_is_refused_if_one_of_its_own_nodes_starts_again(
    desk: Desk, manifest: ModelManifest
) -> None:
    """Another node that starts meanwhile does not matter: the best placement of a moment ago is
    good enough."""
    desk.join("a", starting=False)
    desk.join("b")
    record, version = record_of(desk, manifest), desk.state.version
    event = DeployRequested(record, version, ServedOperation(OperationId("op"), "f", b""), desk.now)
    desk.register("b", starting=False)
    assert apply(desk.state, event).deployments
    desk.register("a", incarnation="i2", starting=True)
    with pytest.raises(AbortedError):
        desk.feed(event)


def test_a_starting_node_is_left_out_and_the_note_says_so(
    desk: Desk, manifest: ModelManifest
) -> None:
    desk.join("a", starting=False)
    desk.join("b")
    placement = record_of(desk, manifest).placement
    assert [stage.node_name for stage in placement.stages] == ["a"]
    assert "Left out: b, still starting." in placement.note
    assert "still starting" not in record_of(desk, manifest, exclude=("b",)).placement.note
    desk.register("b", starting=False)
    placement = record_of(desk, manifest).placement
    assert [stage.node_name for stage in placement.stages] == [
        "a"
    ] and "still starting" not in placement.note


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"source": "b"}, "source"), ({"layers": "a=0:6,b=6:12"}, "layers")],
    ids=str,
)
def test_a_starting_node_that_is_named_is_a_typed_error(
    desk: Desk, manifest: ModelManifest, changes: dict[str, Any], field: str
) -> None:
    desk.join("a", starting=False)
    desk.join("b")
    with pytest.raises(UnavailableError) as refusal:
        record_of(desk, manifest, **changes)
    assert (refusal.value.field, refusal.value.reason, refusal.value.retry_after_s) == (
        field,
        "NODE_STARTING",
        1.0,
    )


def test_a_shortage_says_who_is_still_starting(
    desk: Desk, manifest: ModelManifest, make_facts: Any
) -> None:
    desk.join("a", starting=False, facts=make_facts(1 << 10))
    desk.join("b")
    with pytest.raises(ResourceExhaustedError, match="Left out: b, still starting") as refusal:
        record_of(desk, manifest)
    assert refusal.value.retry_after_s == 1.0


def beat(name: str, incarnation: str, now: float) -> Event:
    """A heartbeat of a node that holds nothing."""
    return HeartbeatsReceived((Heartbeat(NodeId(f"id-{name}"), incarnation, (), 0),), now)


def test_a_waiting_deployment_waits_until_its_nodes_have_started(
    desk: Desk, manifest: ModelManifest
) -> None:
    """After a restart of the coordinator, with a record that an older one saved: nodes reconnect,
    and import again."""
    desk.join("a", starting=False)
    desk.join("b", starting=False)
    record = restored_record(
        new_record(desk.state, record_of(desk, manifest, layers="a=0:6,b=6:12"))
    )
    desk.state = replace(State(instance="next"), deployments={TALE: record})
    for name in "ab":
        desk.join(name, incarnation="i2")
        desk.feed(Ticked(desk.now))
    assert desk.state.deployments[TALE].phase is Phase.WAITING
    desk.register("a", incarnation="i2", starting=False)
    assert desk.state.deployments[TALE].phase is Phase.WAITING
    desk.register("b", incarnation="i2", starting=False)
    desk.feed(beat("a", "i2", desk.now))
    assert desk.state.deployments[TALE].phase is Phase.WAITING, (
        "b may still hold the epoch that the record has"
    )
    desk.feed(beat("b", "i2", desk.now))
    assert desk.state.deployments[TALE].phase is Phase.LOADING


def test_a_node_that_restarts_breaks_its_deployment_once(
    desk: Desk, manifest: ModelManifest
) -> None:
    desk.join("a", starting=False)
    record = replace(new_record(desk.state, record_of(desk, manifest)), ever_ready=True)
    desk.state = replace(desk.state, deployments={TALE: record})
    desk.join("a", incarnation="i2")
    broken = desk.state.deployments[TALE]
    assert broken.phase is Phase.WAITING and broken.failed_attempts == 1
    desk.register("a", incarnation="i2", starting=False)
    desk.feed(Ticked(desk.now + QUIET))
    again = desk.state.deployments[TALE]
    assert (again.phase, again.epoch) == (Phase.LOADING, record.epoch + 1)


def test_nothing_is_measured_of_a_starting_node_nor_of_a_link_to_it(desk: Desk) -> None:
    desk.join("a", starting=False)
    desk.join("b")
    desk.feed(Ticked(desk.now + QUIET))
    assert not desk.state.jobs
    with pytest.raises(UnavailableError, match="b is still starting"):
        desk.feed(MeasureRequested("u", (NodeId("id-b"),), None, False, desk.now))
    with pytest.raises(UnavailableError, match="b is still starting"):
        chosen_nodes(desk.state, ["b"])
    assert list(chosen_nodes(desk.state, [])) == ["id-a"]
    desk.feed(MeasureRequested("u", (NodeId("id-a"),), None, True, desk.now))
    assert not desk.state.jobs and len(desk.state.told) == 1, "there is no link to measure yet"
    desk.now += QUIET
    desk.register("b", starting=False)
    desk.feed(Ticked(desk.now))
    assert not desk.state.jobs, "the moment after a start is not quiet"
    desk.feed(Ticked(desk.now + QUIET))
    assert desk.state.jobs


def test_with_starting_nodes_alone_there_is_none_to_measure(desk: Desk) -> None:
    desk.join("a")
    with pytest.raises(UnavailableError) as refusal:
        chosen_nodes(desk.state, [])
    assert refusal.value.reason == "NODE_STARTING"


def test_measurements_outlive_a_start(desk: Desk) -> None:
    desk.join("a", starting=False)
    desk.join("b", starting=False)
    link = MeasuredLink(NodeId("id-a"), NodeId("id-b"), LINK)
    desk.feed(ProfileReported(ProfileReport(NodeId("id-a"), links=(link,)), desk.now))
    desk.die("a")
    desk.join("a", incarnation="i2")
    desk.register("a", incarnation="i2", starting=False)
    assert desk.state.measured[NodeId("id-a")].links


def test_no_command_but_a_release_goes_to_a_starting_node(
    desk: Desk, manifest: ModelManifest
) -> None:
    desk.join("a", starting=False)
    record = replace(new_record(desk.state, record_of(desk, manifest)), phase=Phase.DELETING)
    desk.state = replace(desk.state, deployments={TALE: record})
    desk.join("a", incarnation="i2")
    sent = [action for action in reconcile(desk.state, desk.now) if isinstance(action, SendCommand)]
    assert [type(action.command).__name__ for action in sent] == ["ReleaseStage"]
