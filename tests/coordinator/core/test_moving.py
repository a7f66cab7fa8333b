"""A replanned deployment moves once the disk has it, and moves back if it cannot load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import command_key, reconcile
from edgeshard_coordinator.core.values.actions import (
    EndService,
    ReleaseOrphans,
    Replan,
    SaveDeployment,
    SendCommand,
)
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    DeleteRequested,
    DeploymentSaved,
    HeadAttached,
    HeadDetached,
    HeartbeatsReceived,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    Replanned,
    ReplanRequested,
    SaveFailed,
    Ticked,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    ServedOperation,
    State,
    validate_state,
)

from edgeshard.domain.control.commands import CommandKind, CommandResult, Heartbeat, PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    AbortedError,
    DataLossError,
    EdgeShardError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageFilling, StagePhase, StageStatus, WeightLoadingWork

NAME = DeploymentName("tale")
FULL = ResourceExhaustedError("the disk is full", field="state-dir", reason="DISK_FULL")
OPERATION = ServedOperation(OperationId("replan"), "f", b"")


def placed(text: str) -> Placement:
    """Such as `a=0:6,b=6:12`."""
    stages = []
    for index, part in enumerate(text.split(",")):
        name, layers = part.split("=")
        first, end = map(int, layers.split(":"))
        at = LayerRange(first, end)
        stages.append(
            PlacedStage(index, NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", at, 1000, 1000)
        )
    return Placement(tuple(stages), 16, 8, 1, 1)


BEFORE, AFTER = placed("a=0:6,b=6:12"), placed("a=0:4,c=4:12")
DONE = Progress(1, True)


@pytest.fixture
def ready(make_registration: Any) -> State:
    """On nodes a and b at epoch 3; node c is there, too."""
    state = State(instance="test")
    for number, name in enumerate("abc", 1):
        state = apply(state, NodeRegistered(make_registration(name), now=0.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", number, now=0.0))
    record = DeploymentRecord(
        uid="u1",
        spec=parse_spec({"name": "tale", "model": "tiny", "source": "a"}),
        manifest_digest=Digest("d" * 64),
        placement=BEFORE,
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
    )
    return valid(issued(replace(state, deployments={NAME: record})))


def valid(state: State) -> State:
    validate_state(state)
    return state


def issued(state: State) -> State:
    """The state once all that is due was begun."""
    while actions := reconcile(state, 1.0):
        for action in actions:
            state = apply(state, ActionIssued(action, now=1.0))
    return state


def asked(state: State, placement: Placement = AFTER, **changes: Any) -> State:
    event = ReplanRequested(NAME, "u1", placement, state.version, OPERATION, 1.0)
    return valid(apply(state, replace(event, **changes)))


def saved(state: State) -> State:
    record = state.deployments[NAME]
    epoch = record.on_disk.epoch
    return valid(apply(state, DeploymentSaved(NAME, "u1", record.revision, epoch, now=1.0)))


def moving(state: State) -> State:
    return saved(issued(asked(state)))


def answer(
    state: State, kind: CommandKind, stage: int = 0, failure: EdgeShardError | None = None
) -> State:
    record = state.deployments[NAME]
    result = CommandResult(command_key(record, kind, stage).operation_id, failure)
    return valid(
        apply(state, CommandAnswered(record.placement.stages[stage].node_id, result, now=1.0))
    )


def loaded(state: State) -> State:
    """Every stage is prepared, and the head at work."""
    for stage in range(len(state.deployments[NAME].placement.stages)):
        state = answer(issued(state), CommandKind.PREPARE, stage)
    state = issued(saved(issued(state)))
    record = state.deployments[NAME]
    state = apply(state, HeadAttached(record.head.node_id, NAME, record.epoch, 77, now=1.0))
    return answer(state, CommandKind.ACTIVATE)


def where(state: State) -> tuple[Phase, int, Placement]:
    record = state.deployments[NAME]
    return record.phase, record.epoch, record.placement


def went_back(state: State) -> State:
    """The state once the search for a placement gave the former one, and that is loaded."""
    due = [action for action in reconcile(state, 1.0) if isinstance(action, Replan)]
    assert [action.version for action in due] == [state.version]
    state = apply(issued(state), Replanned(NAME, "u1", state.version, BEFORE, now=1.0))
    assert where(valid(state)) == (Phase.LOADING, 5, BEFORE)
    assert state.deployments[NAME].former is None, (
        "where that fails as well, recovery goes its own way"
    )
    return loaded(saved(issued(state)))


def test_it_moves_when_the_disk_has_it_and_not_before(ready: State) -> None:
    state = asked(ready)
    assert where(state) == (Phase.READY, 3, BEFORE) and state.version > ready.version
    (save,) = reconcile(state, 1.0)
    assert isinstance(save, SaveDeployment)
    there = save.record.on_disk
    assert (there.phase, there.epoch, there.placement) == (Phase.LOADING, 4, AFTER)
    state = apply(state, ActionIssued(save, now=1.0))
    assert state.pending_operation(NAME, OPERATION.operation_id) is not None
    state = saved(state)
    assert where(state) == (Phase.LOADING, 4, AFTER)
    assert state.pending_operation(NAME, OPERATION.operation_id) is None
    actions = reconcile(state, 1.0)
    ends = [action for action in actions if isinstance(action, EndService)]
    assert [(end.epoch, end.failure.reason, end.final) for end in ends] == [(3, "MOVED", False)]
    commands = [action.command for action in actions if isinstance(action, SendCommand)]
    assert [(type(command), command.epoch) for command in commands] == [(PrepareStage, 4)] * 2  # type: ignore[union-attr]
    assert not any(isinstance(action, SaveDeployment) for action in actions), (
        "the disk has it already"
    )


def test_it_is_ready_elsewhere_and_the_node_that_is_left_lets_go(ready: State) -> None:
    state = loaded(moving(ready))
    assert where(state) == (Phase.READY, 4, AFTER) and state.deployments[NAME].former is None
    held = StageStatus(NAME, Epoch(3), 1, LayerRange(6, 12), StagePhase.ACTIVE)
    state = apply(
        issued(state), HeartbeatsReceived((Heartbeat(NodeId("id-b"), "i1", (held,), 0),), now=1.0)
    )
    released = [action for action in reconcile(state, 1.0) if isinstance(action, ReleaseOrphans)]
    assert [(action.node_id, action.stages) for action in released] == [("id-b", ((NAME, 3),))]


def test_a_stage_that_is_packed_for_long_is_not_given_up_while_it_goes_on(ready: State) -> None:
    state = moving(ready)
    now = 1.0
    limit = ready.timings.load_timeout_s
    for done in (0, 10, 20, 30, 30):
        assert state.deployments[NAME].phase is Phase.LOADING, f"{done} bytes are packed"
        now += 0.9 * limit if done else 0.0
        filling = StageFilling(WeightLoadingWork.PACKING, done, 40)
        held = StageStatus(
            NAME,
            Epoch(4),
            0,
            LayerRange(0, 4),
            StagePhase.LOADING,
            fetched_bytes=9,
            filling=filling,
        )
        beats = tuple(
            Heartbeat(NodeId(f"id-{name}"), "i1", (held,) if name == "a" else (), 0)
            for name in "abc"
        )
        state = valid(apply(apply(state, HeartbeatsReceived(beats, now)), Ticked(now)))
    state = valid(apply(apply(state, HeartbeatsReceived(beats, now + limit)), Ticked(now + limit)))
    failure = state.deployments[NAME].failure
    assert failure is not None and failure.reason == "LOADING_TIMEOUT", "nothing more was packed"


def test_what_the_disk_refuses_changes_nothing(ready: State) -> None:
    state = issued(asked(ready))
    revision = state.deployments[NAME].revision
    state = valid(apply(state, SaveFailed(NAME, "u1", revision, FULL, 1.0, now=1.0)))
    assert (
        where(state) == (Phase.READY, 3, BEFORE) and state.refusal(OPERATION.operation_id) == FULL
    )
    (save,) = reconcile(state, 2.0)
    assert isinstance(save, SaveDeployment) and save.record.on_disk.phase is Phase.READY
    state = saved(apply(state, ActionIssued(save, now=2.0)))
    assert where(state) == (Phase.READY, 3, BEFORE)
    assert where(moving(state)) == (Phase.LOADING, 4, AFTER), "and asked again, it moves"


def test_memory_of_a_move_that_is_not_on_disk_counts_as_taken(ready: State) -> None:
    c = NodeId("id-c")
    state = asked(ready)
    assert state.free_bytes(state.nodes[c]) == ready.free_bytes(ready.nodes[c]) - 2000


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"snapshot_version": 0}, AbortedError, "STALE_PLACEMENT"),
        ({"uid": "u0"}, NotFoundError, "NOT_FOUND"),
        ({"deployment": DeploymentName("other")}, NotFoundError, "NOT_FOUND"),
    ],
)
def test_what_was_found_for_another_state_is_refused(
    ready: State, changes: dict[str, Any], error: type[EdgeShardError], reason: str
) -> None:
    with pytest.raises(error) as caught:
        asked(ready, **changes)
    assert caught.value.reason == reason


def test_only_one_that_is_ready_and_was_planned_moves(ready: State) -> None:
    record = ready.deployments[NAME]
    split = {"name": "tale", "model": "tiny", "source": "a", "layers": "a=0:6,b=6:12"}
    by_hand = replace(record.spec, layers=parse_spec(split).layers)
    with pytest.raises(FailedPreconditionError) as caught:
        asked(replace(ready, deployments={NAME: replace(record, spec=by_hand)}))
    assert caught.value.field == "layers" and "--layers" in caught.value.message
    for state in (
        asked(ready),
        moving(ready),
        apply(ready, NodeDisconnected(NodeId("id-b"), 2, now=1.0)),
    ):
        with pytest.raises(UnavailableError):
            asked(state)
    with pytest.raises(FailedPreconditionError):
        asked(apply(ready, DeleteRequested(NAME, OPERATION, now=1.0)))


@pytest.mark.parametrize("first", ["the disk answers", "the node goes"])
def test_a_node_that_goes_before_the_disk_has_it_puts_the_move_off(
    ready: State, first: str
) -> None:
    """Recovery has its own way, from the placement that was at work; the disk may be an epoch ahead
    of it."""
    state = issued(asked(ready))
    revision = state.deployments[NAME].revision
    if first == "the node goes":
        state = valid(apply(state, NodeDisconnected(NodeId("id-b"), 2, now=1.0)))
        assert where(state) == (Phase.WAITING, 3, BEFORE)
        state = valid(
            apply(issued(state), DeploymentSaved(NAME, "u1", revision, Epoch(4), now=1.0))
        )
        assert (
            where(state) == (Phase.WAITING, 3, BEFORE) and state.deployments[NAME].saved_epoch == 3
        )
        state = apply(state, Replanned(NAME, "u1", state.version, placed("a=0:6,c=6:12"), now=1.0))
    else:
        state = valid(apply(saved(state), NodeDisconnected(NodeId("id-b"), 2, now=1.0)))
        assert where(state) == (Phase.LOADING, 4, AFTER), "it is not needed any more"
        return
    assert where(valid(state)) == (Phase.LOADING, 4, placed("a=0:6,c=6:12"))
    assert not any(isinstance(action, SendCommand) for action in reconcile(state, 1.0)), (
        "the disk has another epoch 4"
    )


def test_a_head_that_goes_before_the_disk_has_it_puts_the_move_off(ready: State) -> None:
    state = valid(apply(issued(asked(ready)), HeadDetached(NAME, 9, now=1.0)))
    assert where(saved(issued(state))) == (Phase.ACTIVATING, 3, BEFORE)


@pytest.mark.parametrize("what", ["it fails", "its node goes", "it does not get on"])
def test_where_a_stage_cannot_be_loaded_it_goes_back_to_what_it_had(
    ready: State, what: str
) -> None:
    state = issued(moving(ready))
    match what:
        case "it fails":
            state = answer(state, CommandKind.PREPARE, 1, DataLossError("a tensor is corrupt"))
        case "its node goes":
            state = valid(apply(state, NodeDisconnected(NodeId("id-c"), 3, now=1.0)))
        case _:
            state = answer(state, CommandKind.PREPARE, 0)
            state = apply(state, Ticked(now=1.0))
            for now in (300.0, 602.0):
                seen = tuple(Heartbeat(NodeId(f"id-{name}"), "i1", (), 0) for name in "abc")
                state = apply(apply(state, HeartbeatsReceived(seen, now=now)), Ticked(now=now))
    assert where(valid(state)) == (Phase.WAITING, 4, AFTER)
    assert where(went_back(state)) == (Phase.READY, 5, BEFORE)


def test_where_the_head_does_not_open_it_goes_back_too(ready: State) -> None:
    """As when the nodes do not reach each other, for which no node can be blamed."""
    state = issued(moving(ready))
    for stage in range(2):
        state = answer(state, CommandKind.PREPARE, stage)
    state = answer(issued(state), CommandKind.ACTIVATE, 0, UnavailableError("no link"))
    assert where(state) == (Phase.WAITING, 4, AFTER) and not state.deployments[NAME].avoided
    state = went_back(state)
    assert where(state) == (Phase.READY, 5, BEFORE) and state.deployments[NAME].former is None


def test_one_that_moves_can_be_deleted(ready: State) -> None:
    state = issued(apply(issued(moving(ready)), DeleteRequested(NAME, OPERATION, now=1.0)))
    assert where(saved(state)) == (Phase.DELETING, 4, AFTER)
    state = issued(apply(issued(asked(ready)), DeleteRequested(NAME, OPERATION, now=1.0)))
    assert state.deployments[NAME].on_disk.phase is Phase.DELETING
    assert where(saved(state)) == (Phase.DELETING, 3, BEFORE)


def test_a_move_does_not_begin_where_a_deletion_is_on_its_way_to_the_disk(ready: State) -> None:
    """The deletion puts the old epoch on disk again, after which a restarted coordinator hands out
    the new one."""
    state = issued(asked(ready))
    of_move = state.deployments[NAME].revision
    state = issued(valid(apply(state, DeleteRequested(NAME, OPERATION, now=1.0))))
    state = valid(apply(state, DeploymentSaved(NAME, "u1", of_move, Epoch(4), now=1.0)))
    assert where(state) == (Phase.READY, 3, BEFORE), "it goes on until the disk has the deletion"
    assert where(saved(issued(state))) == (Phase.DELETING, 3, BEFORE)


def test_the_epoch_of_a_move_that_is_off_is_not_that_of_the_recovery(ready: State) -> None:
    """The disk has epoch 4 with other nodes, and will have epoch 3 again before it has this epoch
    4."""
    state = issued(asked(ready))
    of_move = state.deployments[NAME].revision
    state = issued(apply(state, NodeDisconnected(NodeId("id-b"), 2, now=1.0)))
    found = placed("a=0:6,c=6:12")
    state = issued(valid(apply(state, Replanned(NAME, "u1", state.version, found, now=1.0))))
    state = valid(apply(state, DeploymentSaved(NAME, "u1", of_move, Epoch(4), now=1.0)))
    assert where(state) == (Phase.LOADING, 4, found)
    assert not any(isinstance(action, SendCommand) for action in reconcile(state, 1.0))
    assert any(isinstance(action, SendCommand) for action in reconcile(saved(state), 1.0)), (
        "now the disk has it"
    )
