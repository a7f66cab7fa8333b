"""A node speaks of its own. Its word on another's stage, command or standby changes no
deployment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest
from edgeshard_coordinator.core.deployments.deployments import NODE_LOST, broke
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.values import authority
from edgeshard_coordinator.core.values.actions import PlanStandby, Replan
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    DeploymentSaved,
    DeployRequested,
    HeadAttached,
    HeartbeatsReceived,
    LinkReported,
    NodeConnected,
    NodeRegistered,
    ProfileReported,
    Replanned,
    ReplanRequested,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    ServedOperation,
    Standby,
    State,
    deployment_view,
    validate_state,
)

from edgeshard.domain.control.commands import (
    AgentMessage,
    CommandKey,
    CommandKind,
    CommandResult,
    Heartbeat,
    ProfileReport,
    Registration,
)
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import AbortedError, UnavailableError
from edgeshard.domain.ids import (
    MAX_EPOCH,
    DeploymentName,
    Digest,
    Epoch,
    NodeId,
    NodeName,
    OperationId,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.nodes.profile import MeasuredLink
from edgeshard.domain.requests.head import HeadEvent, HeadMessage
from edgeshard.domain.requests.link import LinkSuspected

NAME = DeploymentName("tale")
A = NodeId("id-a")
B = NodeId("id-b")
LIAR = NodeId("id-m")
DONE = Progress(1, True)
GIB = 1 << 30


def placed(*names: str, parameter_bytes: int = 1000) -> Placement:
    stages = tuple(
        PlacedStage(
            *(index, NodeId(f"id-{name}"), NodeName(name), f"{name}:7000"),
            *(LayerRange(index * 6, index * 6 + 6), parameter_bytes, 1000),
        )
        for index, name in enumerate(names)
    )
    return Placement(stages, 16, 8, 1, 1)


@pytest.fixture
def ready(make_registration: Any) -> State:
    """On nodes a and b at epoch 3, with a standby on c; the liar has no part in it."""
    state = State(instance="test")
    for number, name in enumerate("abcm", 1):
        state = apply(state, NodeRegistered(make_registration(name), now=0.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", number, now=0.0))
    record = DeploymentRecord(
        uid="u1",
        spec=parse_spec({"name": "tale", "model": "tiny", "source": "a"}),
        manifest_digest=Digest("d" * 64),
        placement=placed("a", "b"),
        epoch=Epoch(3),
        phase=Phase.READY,
        ever_ready=True,
        prepared=(DONE, DONE),
        released=(Progress(), Progress()),
        activated=DONE,
        attachment=9,
        saving=1,
        saved=1,
        saved_epoch=Epoch(3),
        standbys=(Standby(5, NodeId("id-c"), Epoch(3), LayerRange(0, 6), 100, Progress(3)),),
    )
    state = replace(state, deployments={NAME: record})
    validate_state(state)
    return state


def beat(state: State, node_id: NodeId, *stages: StageStatus, now: float = 1.0) -> State:
    after = apply(state, HeartbeatsReceived((Heartbeat(node_id, "i1", stages, 0),), now))
    validate_state(after)
    return after


def status(stage: int = 1, phase: StagePhase = StagePhase.FAILED, epoch: int = 3) -> StageStatus:
    return StageStatus(NAME, Epoch(epoch), stage, LayerRange(6, 12), phase)


def messages() -> Iterator[type]:
    """The classes of an agent's messages, including nested ones that a deployment's fate depends
    on."""
    yield from (Registration, ProfileReport, MeasuredLink, StageStatus, HeadEvent)
    yield from get_args(AgentMessage)
    yield from get_args(HeadMessage)


def test_each_field_of_an_agents_message_has_a_row() -> None:
    kinds = list(messages())
    assert all(map(is_dataclass, kinds)) and set(kinds) == authority.TABLE.keys()
    for kind in kinds:
        assert authority.TABLE[kind].keys() == {item.name for item in fields(kind)}, kind


@pytest.mark.parametrize("node_id", [LIAR, A], ids=["no stage", "another stage"])
def test_a_stage_fails_by_its_own_node_only(ready: State, node_id: NodeId) -> None:
    lies = [status(epoch=epoch) for epoch in range(1, 100)]
    after = beat(ready, node_id, *lies)
    assert after.deployments[NAME] is ready.deployments[NAME]
    assert not [
        stage
        for stage in deployment_view(after, after.deployments[NAME]).stages
        if stage.stage == 1
    ]
    assert beat(after, B, status()).deployments[NAME].epoch == 4


def test_a_node_shows_one_status_of_a_stage_and_of_its_own(ready: State) -> None:
    state = beat(
        beat(ready, A, status(0, StagePhase.ACTIVE), status(1, StagePhase.READY)), LIAR, status(0)
    )
    assert [(s.stage, s.phase) for s in deployment_view(state, state.deployments[NAME]).stages] == [
        (0, StagePhase.ACTIVE)
    ]


def loading(state: State) -> State:
    record = replace(
        state.deployments[NAME],
        phase=Phase.LOADING,
        attachment=0,
        prepared=(Progress(1), Progress(2)),
        activated=Progress(),
        deadline=100.0,
    )
    return state.with_record(record)


@pytest.mark.parametrize(
    "kind", [CommandKind.PREPARE, CommandKind.ACTIVATE, CommandKind.RELEASE, CommandKind.STANDBY]
)
def test_a_command_is_answered_by_its_own_node_only(ready: State, kind: CommandKind) -> None:
    state = loading(ready) if kind is not CommandKind.STANDBY else ready
    number = 5 if kind is CommandKind.STANDBY else 0
    key = CommandKey("u1", Epoch(3), kind, number)
    for failure in (None, UnavailableError("no")):
        result = CommandResult(key.operation_id, failure, status(0, StagePhase.READY))
        after = apply(state, CommandAnswered(LIAR, result, 1.0))
        assert after.deployments[NAME] is state.deployments[NAME] and after.nodes is state.nodes


def test_an_answer_to_no_command_leaves_no_stage(ready: State) -> None:
    for number in range(100):
        key = CommandKey(f"u{number + 2}", Epoch(3), CommandKind.PREPARE, 0)
        ready = apply(
            ready, CommandAnswered(LIAR, CommandResult(key.operation_id, None, status(number)), 1.0)
        )
    assert not ready.nodes[LIAR].stages


def test_a_link_is_suspect_and_a_head_attached_by_their_own_nodes_only(ready: State) -> None:
    link = LinkSuspected(NAME, Epoch(3), 0, 1, False, "nothing arrives")
    assert not apply(ready, LinkReported(LIAR, link, 1.0)).suspects
    assert (
        not apply(ready, LinkReported(B, link, 1.0)).suspects
        and apply(ready, LinkReported(A, link, 1.0)).suspects
    )
    for node_id in (LIAR, B):
        assert (
            apply(ready, HeadAttached(node_id, NAME, Epoch(3), 10, 1.0))
            .deployments[NAME]
            .attachment
            == 9
        )


def test_a_restarted_coordinator_adopts_no_epoch_by_anothers_word(ready: State) -> None:
    record = replace(
        ready.deployments[NAME],
        phase=Phase.WAITING,
        attachment=0,
        adoptable=True,
        activated=Progress(),
        standbys=(),
    )
    state = ready.with_record(replace(record, prepared=(Progress(), Progress())))
    state = beat(state, LIAR, status(0, StagePhase.ACTIVE), status(1, StagePhase.READY))
    state = beat(beat(state, A, status(0, StagePhase.ACTIVE), status(1, StagePhase.READY)), B)
    assert state.deployments[NAME].phase is Phase.LOADING and state.deployments[NAME].epoch == 4


def test_a_lie_about_an_epoch_leaves_the_deployment_as_it_is(ready: State) -> None:
    state = beat(
        ready, LIAR, status(0, StagePhase.ACTIVE, MAX_EPOCH), status(1, StagePhase.READY, 3)
    )
    assert state.deployments[NAME] is ready.deployments[NAME]


# Nodes that change all the time


def changed(state: State, node_id: NodeId, budget: int, now: float = 1.0) -> State:
    facts = replace(state.nodes[node_id].facts, memory_budget_bytes=budget)
    return apply(state, ProfileReported(ProfileReport(node_id, facts), now))


def test_a_node_that_is_not_in_the_placement_does_not_make_it_stale(ready: State) -> None:
    version = ready.version
    state = ready
    for number in range(20):
        state = changed(state, LIAR, GIB + number)
    assert state.version == version + 20
    event = ReplanRequested(NAME, "u1", placed("a", "c"), version, OPERATION, 2.0)
    assert apply(state, event).deployments[NAME].move is not None


OPERATION = ServedOperation(OperationId("op"), "print", b"")


def test_a_placement_is_stale_if_its_nodes_lack_memory_or_left(
    ready: State, make_registration: Any
) -> None:
    event = ReplanRequested(NAME, "u1", placed("a", "c"), ready.version, OPERATION, 2.0)
    apply(changed(ready, NodeId("id-c"), 5000), event)
    again = apply(ready, NodeRegistered(make_registration("c", "i2"), 2.0))
    again = apply(again, NodeConnected(NodeId("id-c"), "i2", 77, 2.0))
    moved = apply(
        ready, NodeRegistered(replace(make_registration("c"), address="elsewhere:1"), 2.0)
    )
    for state in (changed(ready, NodeId("id-c"), 1999), again, moved):
        with pytest.raises(AbortedError) as stale:
            apply(state, event)
        assert stale.value.reason == "STALE_PLACEMENT"


def test_a_placement_is_stale_if_another_deployment_took_its_memory(ready: State) -> None:
    spec = parse_spec({"name": "poem", "model": "tiny", "source": "c"})
    budget = ready.nodes[NodeId("id-c")].facts.memory_budget_bytes
    blank = replace(
        ready.deployments[NAME],
        uid="u2",
        spec=spec,
        epoch=Epoch(1),
        saving=0,
        saved=0,
        operations=(),
    )
    most = replace(
        blank,
        placement=placed("c", parameter_bytes=budget - 2000),
        phase=Phase.LOADING,
        prepared=(Progress(),),
        released=(Progress(),),
        activated=Progress(),
        standbys=(),
        saved_epoch=Epoch(0),
        deadline=9.0,
    )
    state = apply(ready, DeployRequested(most, ready.version, OPERATION, 1.0))
    event = ReplanRequested(NAME, "u1", placed("a", "c"), ready.version, OPERATION, 2.0)
    with pytest.raises(AbortedError):
        apply(state, event)


def searches(state: State, now: float) -> tuple[State, int]:
    """The state once all that is due was begun, and the searches among that."""
    count = 0
    while actions := reconcile(state, now):
        for action in actions:
            count += isinstance(action, Replan | PlanStandby)
            state = apply(state, ActionIssued(action, now))
    return state, count


def test_a_broken_deployment_has_one_search_at_a_time(ready: State, make_registration: Any) -> None:
    state = apply(ready, NodeRegistered(make_registration("b", "i2"), 1.0))
    state = apply(
        state, DeploymentSaved(NAME, "u1", state.deployments[NAME].revision, Epoch(3), 1.0)
    )
    state, count = searches(state, 1.0)
    assert state.deployments[NAME].phase is Phase.WAITING and count == 1
    begun = state.version
    for number in range(20):
        state, count = searches(changed(state, LIAR, GIB + number, 1.0), 1.0)
        assert count == 0
    none = UnavailableError("no node has room")
    failed = apply(state, Replanned(NAME, "u1", begun, none, 1.0))
    assert searches(failed, 1.1)[1] == 0, (
        "a node that changes all the time does not keep a processor busy"
    )
    assert searches(failed, 2.0)[1] == 1
    found = apply(state, Replanned(NAME, "u1", begun, placed("a", "c"), 1.0))
    assert found.deployments[NAME].phase is Phase.LOADING, "the liar is not in it"


def test_a_stage_that_fails_again_and_again_waits_longer_each_time(ready: State) -> None:
    delays, now = [], 1000.0
    record = ready.deployments[NAME]
    failure = UnavailableError("stage 1 failed", reason="STAGE_FAILED")
    for lived_s in (1.0, 1.0, 1.0, 1.0, 31.0, 1.0):
        record = broke(
            ready, replace(record, phase=Phase.READY, ready_at=now), failure, now + lived_s
        )
        delays.append(record.not_before - now - lived_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 0.0, 1.0]
    lost = UnavailableError("node b went away", reason=NODE_LOST)
    record = broke(ready, replace(record, phase=Phase.READY, ready_at=now), lost, now + 1.0)
    assert record.not_before == now + 1.0
