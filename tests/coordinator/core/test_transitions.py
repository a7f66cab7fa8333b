"""Every phase of a deployment against everything that can happen to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS, Trigger, next_phase
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import command_key, reconcile
from edgeshard_coordinator.core.values.actions import EndService, SendCommand
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    DeleteRequested,
    DeploymentSaved,
    DeployRequested,
    Event,
    HeadAttached,
    HeadDetached,
    HeartbeatsReceived,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    Ticked,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    ServedOperation,
    State,
    deployment_view,
    validate_state,
)

from edgeshard.domain.control.commands import (
    Command,
    CommandKind,
    CommandResult,
    Heartbeat,
    PrepareStage,
    Registration,
)
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    EdgeShardError,
    InternalError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus

NAME = DeploymentName("tale")
OPERATION = ServedOperation(OperationId("op"), "f", b"")
STAGES = tuple(
    PlacedStage(
        i, NodeId(f"id-{n}"), NodeName(n), f"{n}:7000", LayerRange(i * 6, i * 6 + 6), 1000, 1000
    )
    for i, n in enumerate("ab")
)


@pytest.fixture(scope="module")
def start(make_registration: Any) -> State:
    """Nodes a and b connected, nothing deployed."""
    state = State(instance="test")
    for number, name in enumerate("ab", 1):
        state = apply(state, NodeRegistered(make_registration(name), now=0.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", number, now=0.0))
    return state


def _id(record: DeploymentRecord, kind: CommandKind, stage: int = 0) -> OperationId:
    return command_key(record, kind, stage).operation_id


def in_phase(state: State, phase: Phase, ever_ready: bool) -> State:
    """`state` with the deployment at epoch 3 in `phase`, as it would have come there."""
    spec = parse_spec({"name": "tale", "model": "tiny", "source": "a"})
    prepared = phase in (Phase.ACTIVATING, Phase.READY)
    ready = phase is Phase.READY
    record = DeploymentRecord(
        uid="u1",
        spec=spec,
        manifest_digest=Digest("d" * 64),
        placement=Placement(STAGES, 16, 8, 1, 1),
        epoch=Epoch(3),
        phase=phase,
        ever_ready=ever_ready or ready,
        failure=DataLossError("gone wrong") if phase is Phase.FAILED else None,
        prepared=(Progress(1, prepared), Progress(2, prepared)),
        released=(Progress(), Progress()),
        activated=Progress(1, ready) if prepared else Progress(),
        attachment=9 if ready else 0,
        deadline=60.0 if phase in (Phase.LOADING, Phase.ACTIVATING) else None,
        not_before=5.0,
        saving=1,
        saved=1,
        saved_epoch=Epoch(3),
    )
    return replace(state, deployments={NAME: record})


def answer(state: State, kind: str, epoch: int, failure: EdgeShardError | None = None) -> State:
    record = replace(state.deployments[NAME], epoch=Epoch(epoch))
    if kind == "activate":
        result = CommandResult(command_key(record, CommandKind.ACTIVATE).operation_id, failure)
        return apply(state, CommandAnswered(NodeId("id-a"), result, now=1.0))
    for index, stage in enumerate(STAGES):
        result = CommandResult(
            command_key(record, CommandKind.PREPARE, index).operation_id, failure
        )
        state = apply(state, CommandAnswered(stage.node_id, result, now=1.0))
    return state


def happen(state: State, what: str, make_registration: Any) -> State:
    late = DataLossError("tensor x is corrupt")
    events: dict[str, Event] = {
        "node lost": NodeDisconnected(NodeId("id-b"), 2, now=1.0),
        "older stream of a node ends": NodeDisconnected(NodeId("id-b"), 1, now=1.0),
        "newer stream of the same process": NodeConnected(NodeId("id-b"), "i1", 7, now=1.0),
        "node restarts": NodeRegistered(make_registration("b", incarnation="i2"), now=1.0),
        "head detached": HeadDetached(NAME, 9, now=1.0),
        "older attach stream ends": HeadDetached(NAME, 8, now=1.0),
        "tick before the deadline": Ticked(now=4.9),
        "tick after the deadline": Ticked(now=61.0),
        "attached at an older epoch": HeadAttached(NodeId("id-a"), NAME, Epoch(2), 9, now=1.0),
        "attached by another node": HeadAttached(NodeId("id-b"), NAME, Epoch(3), 9, now=1.0),
    }
    if what in events:
        return apply(state, events[what])
    if what == "delete":
        asked = apply(state, DeleteRequested(NAME, OPERATION, now=1.0))
        record = asked.deployments[NAME]
        return apply(asked, DeploymentSaved(NAME, "u1", record.revision, record.epoch, now=1.0))
    if what == "all prepared":
        return answer(state, "prepare", 3)
    if what == "prepare failed":
        return answer(state, "prepare", 3, late)
    if what == "activated and attached":
        state = apply(state, HeadAttached(NodeId("id-a"), NAME, Epoch(3), 9, now=1.0))
        return answer(state, "activate", 3)
    if what == "activated only":
        return answer(state, "activate", 3)
    if what == "activate failed":
        return answer(state, "activate", 3, late)
    assert what == "answers of an older epoch"
    return answer(answer(state, "prepare", 2, late), "activate", 2, late)


def test_the_example_of_an_epoch_in_architecture_is_what_happens(
    start: State, make_registration: Any
) -> None:
    """ "Failures" in ARCHITECTURE.md, on the coordinator's side and from epoch 3 on."""

    def commands(state: State) -> list[tuple[NodeId, Command]]:
        return [
            (a.node_id, a.command) for a in reconcile(state, now=1.0) if isinstance(a, SendCommand)
        ]

    def phase(state: State) -> tuple[Phase, Epoch]:
        return state.deployments[NAME].phase, state.deployments[NAME].epoch

    state = apply(in_phase(start, Phase.READY, True), NodeDisconnected(NodeId("id-b"), 2, now=1.0))
    assert phase(state) == (Phase.WAITING, 3)
    failed = [action for action in reconcile(state, now=1.0) if isinstance(action, EndService)]
    assert [(action.epoch, action.failure.reason) for action in failed] == [(3, "NODE_LOST")]
    assert "node b" in failed[0].failure.message and not commands(state)

    state = apply(state, NodeRegistered(make_registration("b", incarnation="i2"), now=1.0))
    state = apply(state, NodeConnected(NodeId("id-b"), "i2", 7, now=1.0))
    assert phase(state) == (Phase.LOADING, 4) and not commands(state), (
        "prepared before the epoch is saved"
    )
    record = state.deployments[NAME]
    state = apply(state, DeploymentSaved(NAME, "u1", record.revision, Epoch(4), now=1.0))
    prepares = commands(state)
    assert [node for node, _ in prepares] == ["id-a", "id-b"]
    assert all(isinstance(command, PrepareStage) and command.epoch == 4 for _, command in prepares)

    assert phase(answer(state, "prepare", 3)) == (Phase.LOADING, 4), (
        "an answer of the epoch before counts"
    )
    state = answer(state, "prepare", 4)
    assert phase(state) == (Phase.ACTIVATING, 4)
    assert [node for node, _ in commands(state)] == ["id-a"]
    state = apply(
        answer(state, "activate", 4), HeadAttached(NodeId("id-a"), NAME, Epoch(4), 10, now=1.0)
    )
    assert phase(state) == (Phase.READY, 4)
    assert phase(apply(state, NodeDisconnected(NodeId("id-a"), 1, now=1.0))) == (Phase.WAITING, 4)


# Triggers that change the phase; all others leave it. In the columns: never ready before, ready
# before.
CHANGES: dict[tuple[Phase, str], tuple[Phase, Phase]] = {
    (Phase.LOADING, "all prepared"): (Phase.ACTIVATING, Phase.ACTIVATING),
    (Phase.LOADING, "prepare failed"): (Phase.FAILED, Phase.WAITING),
    (Phase.LOADING, "node lost"): (Phase.FAILED, Phase.WAITING),
    (Phase.LOADING, "node restarts"): (Phase.FAILED, Phase.WAITING),
    (Phase.LOADING, "tick after the deadline"): (Phase.FAILED, Phase.WAITING),
    (Phase.LOADING, "delete"): (Phase.DELETING, Phase.DELETING),
    (Phase.ACTIVATING, "activated and attached"): (Phase.READY, Phase.READY),
    (Phase.ACTIVATING, "activate failed"): (Phase.FAILED, Phase.WAITING),
    (Phase.ACTIVATING, "node lost"): (Phase.FAILED, Phase.WAITING),
    (Phase.ACTIVATING, "node restarts"): (Phase.FAILED, Phase.WAITING),
    (Phase.ACTIVATING, "tick after the deadline"): (Phase.FAILED, Phase.WAITING),
    (Phase.ACTIVATING, "delete"): (Phase.DELETING, Phase.DELETING),
    (Phase.READY, "node lost"): (Phase.WAITING, Phase.WAITING),
    (Phase.READY, "node restarts"): (Phase.WAITING, Phase.WAITING),
    (Phase.READY, "head detached"): (Phase.ACTIVATING, Phase.ACTIVATING),
    (Phase.READY, "delete"): (Phase.DELETING, Phase.DELETING),
    (Phase.WAITING, "tick after the deadline"): (Phase.LOADING, Phase.LOADING),
    (Phase.WAITING, "delete"): (Phase.DELETING, Phase.DELETING),
    (Phase.FAILED, "delete"): (Phase.DELETING, Phase.DELETING),
}
HAPPENINGS = [
    "all prepared",
    "prepare failed",
    "activated and attached",
    "activated only",
    "activate failed",
    "answers of an older epoch",
    "node lost",
    "older stream of a node ends",
    "newer stream of the same process",
    "node restarts",
    "head detached",
    "older attach stream ends",
    "attached at an older epoch",
    "attached by another node",
    "tick before the deadline",
    "tick after the deadline",
    "delete",
]


# A deployment that was ready never fails.
STARTS = [
    (phase, ready)
    for phase in Phase
    for ready in (False, True)
    if (phase, ready) != (Phase.FAILED, True)
]


@pytest.mark.parametrize("what", HAPPENINGS)
@pytest.mark.parametrize(("phase", "ever_ready"), STARTS)
def test_every_phase_and_happening(
    start: State, make_registration: Any, phase: Phase, what: str, ever_ready: bool
) -> None:
    before = in_phase(start, phase, ever_ready)
    validate_state(before)
    after = happen(before, what, make_registration)
    validate_state(after)
    expected = CHANGES.get((phase, what), (phase, phase))[ever_ready]
    record = after.deployments[NAME]
    assert record.phase is expected
    if record.phase is Phase.LOADING and phase is not Phase.LOADING:
        assert record.epoch == 4 and not any(progress.sent_on for progress in record.prepared)
    else:
        assert record.epoch == 3
    assert (record.revision > before.deployments[NAME].revision) == (
        record.phase is not phase or (phase is Phase.DELETING and what == "delete")
    )


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.ACTIVATING, Phase.READY, Phase.WAITING])
def test_what_waits_for_a_deployment_that_is_deleted_ends_with_it(
    start: State, phase: Phase
) -> None:
    """Requests of a ready deployment are parked while it loads again, and would wait for an epoch
    that never begins."""
    asked = apply(in_phase(start, phase, True), DeleteRequested(NAME, OPERATION, now=1.0))
    revision = asked.deployments[NAME].revision
    state = apply(asked, DeploymentSaved(NAME, "u1", revision, Epoch(3), now=1.0))
    ends = [action for action in reconcile(state, now=1.0) if isinstance(action, EndService)]
    assert [(end.epoch, end.failure.reason, end.final) for end in ends] == [
        (3, "DEPLOYMENT_DELETED", True)
    ]


def test_the_table_has_no_way_out_of_deleting_and_none_missing() -> None:
    assert all(phase is not Phase.DELETING for phase, _ in TRANSITIONS)
    assert {phase for phase, trigger in TRANSITIONS if trigger is Trigger.DELETE} == set(Phase) - {
        Phase.DELETING
    }
    with pytest.raises(InternalError):
        next_phase(Phase.FAILED, Trigger.ALL_PREPARED)


def test_a_prepare_waits_for_its_epoch_on_disk(start: State) -> None:
    state = in_phase(start, Phase.LOADING, False)
    fresh = replace(
        state.deployments[NAME],
        prepared=(Progress(), Progress()),
        saved_epoch=Epoch(2),
        saving=0,
        saved=0,
    )
    state = replace(state, deployments={NAME: fresh})
    kinds = [
        type(action).__name__
        for action in reconcile(state, 1.0)
        if type(action).__name__ != "SaveNode"
    ]
    assert kinds == ["SaveDeployment"]
    state = apply(state, DeploymentSaved(NAME, "u1", 1, Epoch(3), now=1.0))
    commands = [a.command for a in reconcile(state, 1.0) if hasattr(a, "command")]
    assert [type(command) for command in commands] == [PrepareStage, PrepareStage]


def test_reconcile_asks_until_an_action_is_issued_and_then_no_more(start: State) -> None:
    state = in_phase(start, Phase.FAILED, False)
    actions = reconcile(state, 1.0)
    assert actions and reconcile(state, 1.0) == actions
    for action in actions:
        state = apply(state, ActionIssued(action, now=1.0))
    assert reconcile(state, 1.0) == []


def test_a_stale_placement_and_a_used_name_are_refused(start: State) -> None:
    record = in_phase(start, Phase.LOADING, False).deployments[NAME]
    with pytest.raises(AbortedError):
        apply(start, DeployRequested(record, start.version - 1, OPERATION, now=1.0))
    record = replace(
        record, prepared=(Progress(), Progress()), saving=0, saved=0, saved_epoch=Epoch(0)
    )
    state = apply(start, DeployRequested(record, start.version, OPERATION, now=1.0))
    assert state.version == start.version + 1
    with pytest.raises(AlreadyExistsError):
        apply(state, DeployRequested(record, state.version, OPERATION, now=1.0))


def test_a_retry_waits_longer_every_time(start: State) -> None:
    state, delays = in_phase(start, Phase.LOADING, True), []
    for _ in range(7):
        record = replace(state.deployments[NAME], phase=Phase.LOADING)
        state = replace(state, deployments={NAME: record})
        state = answer(state, "prepare", record.epoch, DataLossError("again"))
        delays.append(state.deployments[NAME].not_before - 1.0)
    assert delays == [1, 2, 4, 8, 16, 30, 30]


def test_the_state_a_broken_invariant_is_found_in(start: State) -> None:
    good = in_phase(start, Phase.READY, True).deployments[NAME]
    for broken in (
        replace(good, attachment=0),
        replace(good, prepared=(Progress(1, True), Progress(2, False))),
        replace(good, saved_epoch=Epoch(2)),
        replace(good, phase=Phase.FAILED),
        replace(good, saved=9),
    ):
        with pytest.raises(InternalError):
            validate_state(replace(start, deployments={NAME: broken}))
    with pytest.raises(InternalError):
        validate_state(replace(start, deployments={NAME: good}, retired={NAME: Epoch(3)}))


# Messages of another epoch


def stage_status(epoch: int, phase: StagePhase) -> StageStatus:
    return StageStatus(NAME, Epoch(epoch), 1, LayerRange(6, 12), phase)


def said_of(state: State, what: str, epoch: int) -> State:
    """The deployment receives a message about `epoch`."""
    at = replace(state.deployments[NAME], epoch=Epoch(epoch))
    failed = Heartbeat(NodeId("id-b"), "i1", (stage_status(epoch, StagePhase.FAILED),), 0)
    events: dict[str, Event] = {
        "prepared": CommandAnswered(
            NodeId("id-b"), CommandResult(_id(at, CommandKind.PREPARE, 1), None), now=1.0
        ),
        "not prepared": CommandAnswered(
            NodeId("id-b"),
            CommandResult(_id(at, CommandKind.PREPARE, 1), DataLossError("x")),
            now=1.0,
        ),
        "activated": CommandAnswered(
            NodeId("id-a"), CommandResult(_id(at, CommandKind.ACTIVATE), None), now=1.0
        ),
        "not activated": CommandAnswered(
            NodeId("id-a"),
            CommandResult(_id(at, CommandKind.ACTIVATE), DataLossError("x")),
            now=1.0,
        ),
        "released": CommandAnswered(
            NodeId("id-b"), CommandResult(_id(at, CommandKind.RELEASE, 1), None), now=1.0
        ),
        "attached": HeadAttached(NodeId("id-a"), NAME, Epoch(epoch), 77, now=1.0),
        "failed": HeartbeatsReceived((failed,), now=1.0),
    }
    return apply(state, events[what])


HEARD_IN = {
    "prepared": Phase.LOADING,
    "not prepared": Phase.LOADING,
    "activated": Phase.ACTIVATING,
    "not activated": Phase.ACTIVATING,
    "released": Phase.DELETING,
    "attached": Phase.ACTIVATING,
    "failed": Phase.READY,
}


def in_the_midst(state: State, phase: Phase) -> State:
    """In the phase, with everything it still waits for outstanding."""
    state = in_phase(state, phase, True)
    record = state.deployments[NAME]
    if phase is Phase.LOADING:
        record = replace(record, prepared=(Progress(1), Progress(2)))
    return replace(state, deployments={NAME: record})


@pytest.mark.parametrize("what", HEARD_IN)
def test_what_is_said_of_the_epoch_counts(start: State, what: str) -> None:
    """So that the next test proves something."""
    before = in_the_midst(start, HEARD_IN[what])
    assert said_of(before, what, 3).deployments[NAME] != before.deployments[NAME]


@pytest.mark.parametrize("epoch", [1, 2, 4, 13])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("what", HEARD_IN)
def test_what_is_said_of_another_epoch_changes_nothing(
    start: State, what: str, phase: Phase, epoch: int
) -> None:
    before = in_the_midst(start, phase)
    assert said_of(before, what, epoch).deployments == before.deployments


@pytest.mark.parametrize("what", ["attached", "prepared", "not prepared", "released"])
def test_what_another_node_says_changes_nothing(start: State, what: str) -> None:
    state = apply(in_the_midst(start, HEARD_IN[what]), NodeRegistered(make_other(start), now=0.0))
    at = state.deployments[NAME]
    failure = DataLossError("x") if what == "not prepared" else None
    operation = (
        _id(at, CommandKind.RELEASE, 1) if what == "released" else _id(at, CommandKind.PREPARE, 1)
    )
    event: Event = CommandAnswered(NodeId("id-c"), CommandResult(operation, failure), now=1.0)
    if what == "attached":
        event = HeadAttached(NodeId("id-b"), NAME, Epoch(3), 77, now=1.0)
    assert apply(state, event).deployments == state.deployments


def make_other(state: State) -> Registration:
    node = state.nodes[NodeId("id-b")]
    return Registration(NodeId("id-c"), NodeName("c"), "c:1", node.wire_version, node.facts, "i1")


@pytest.mark.parametrize(("held", "left"), [(2, ()), (3, ()), (4, (4,))])
def test_a_release_takes_the_stage_of_its_epoch_and_of_those_before(
    start: State, held: int, left: tuple[int, ...]
) -> None:
    """A stage above it is of a deployment that a coordinator had made and lost; it has to be
    released by itself."""
    shown = Heartbeat(NodeId("id-b"), "i1", (stage_status(held, StagePhase.READY),), 0)
    state = apply(in_phase(start, Phase.DELETING, True), HeartbeatsReceived((shown,), now=1.0))
    state = said_of(state, "released", 3)
    assert tuple(stage.epoch for stage in state.nodes[NodeId("id-b")].stages) == left


def test_a_deployment_is_shown_with_the_stages_of_its_epoch(start: State) -> None:
    state = in_phase(start, Phase.READY, True)
    for epoch in (2, 3, 4):
        shown = Heartbeat(NodeId("id-b"), "i1", (stage_status(epoch, StagePhase.ACTIVE),), 0)
        state = apply(state, HeartbeatsReceived((shown,), now=1.0))
        stages = deployment_view(state, state.deployments[NAME]).stages
        assert [stage.epoch for stage in stages] == [3] * (epoch == 3)
