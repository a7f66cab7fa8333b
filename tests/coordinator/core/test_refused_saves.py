"""A call's change takes effect when it is on disk; a change that the disk refuses has no effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.values.actions import EndService, SaveDeployment, SendCommand
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    DeleteRequested,
    DeploymentSaved,
    DeployRequested,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    SaveFailed,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    ServedOperation,
    State,
    validate_state,
)

from edgeshard.domain.control.commands import ReleaseStage
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.model import LayerRange

NAME = DeploymentName("tale")
FULL = ResourceExhaustedError("the disk is full", field="state-dir", reason="DISK_FULL")
STAGES = tuple(
    PlacedStage(
        i, NodeId(f"id-{n}"), NodeName(n), f"{n}:7000", LayerRange(i * 6, i * 6 + 6), 1000, 1000
    )
    for i, n in enumerate("ab")
)


def operation(name: str) -> ServedOperation:
    return ServedOperation(OperationId(name), "f", b"")


def issued(state: State) -> State:
    """The state once all that is due was begun."""
    while actions := reconcile(state, 1.0):
        for action in actions:
            state = apply(state, ActionIssued(action, now=1.0))
    return state


@pytest.fixture
def empty(make_registration: Any) -> State:
    state = State(instance="test")
    for number, name in enumerate("ab", 1):
        state = apply(state, NodeRegistered(make_registration(name), now=0.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", number, now=0.0))
    return issued(state)


@pytest.fixture
def asked(empty: State) -> State:
    """A deployment was asked for, and its save is under way."""
    spec = parse_spec({"name": "tale", "model": "tiny", "source": "a"})
    blank = DeploymentRecord("u1", spec, Digest("d" * 64), Placement(STAGES, 16, 8, 1, 1), Epoch(0))
    event = DeployRequested(new_record(empty, blank), empty.version, operation("deploy"), now=1.0)
    return issued(apply(empty, event))


@pytest.fixture
def ready(asked: State) -> State:
    saved = apply(asked, DeploymentSaved(NAME, "u1", 1, Epoch(1), now=1.0))
    done = (Progress(1, True), Progress(2, True))
    record = replace(
        saved.deployments[NAME],
        phase=DeploymentPhase.READY,
        ever_ready=True,
        prepared=done,
        activated=Progress(1, True),
        attachment=9,
    )
    state = replace(saved, deployments={NAME: record})
    validate_state(state)
    return state


def failed(state: State, revision: int, now: float = 1.0) -> State:
    after = apply(state, SaveFailed(NAME, "u1", revision, FULL, 1.0, now))
    validate_state(after)
    return after


def test_a_deployment_that_cannot_be_saved_is_not_there(asked: State, empty: State) -> None:
    after = failed(asked, 1)
    assert not after.deployments and after.refusal(OperationId("deploy")) == FULL
    assert not any(isinstance(action, SendCommand) for action in reconcile(after, 9.0))
    assert after.first_epoch(NAME) == empty.first_epoch(NAME), "no node was told of its epoch"


def test_a_call_that_is_repeated_is_not_refused_by_the_time_before(asked: State) -> None:
    after = failed(asked, 1)
    record = replace(asked.deployments[NAME], uid="u2", operations=())
    again = apply(after, DeployRequested(record, after.version, operation("deploy"), now=2.0))
    assert again.refusal(OperationId("deploy")) is None
    assert again.pending_operation(NAME, OperationId("deploy")) is not None


def test_a_deletion_takes_effect_when_it_is_on_disk_and_not_before(ready: State) -> None:
    asked = apply(ready, DeleteRequested(NAME, operation("delete"), now=1.0))
    (save,) = reconcile(asked, 1.0)
    assert (
        isinstance(save, SaveDeployment) and save.record.on_disk.phase is DeploymentPhase.DELETING
    )
    assert asked.deployments[NAME].phase is DeploymentPhase.READY
    after = apply(
        issued(asked), DeploymentSaved(NAME, "u1", save.record.revision, Epoch(1), now=1.0)
    )
    record, actions = after.deployments[NAME], reconcile(after, 1.0)
    assert record.phase is DeploymentPhase.DELETING and record.durable
    assert any(isinstance(action, EndService) for action in actions)
    released = [
        a for a in actions if isinstance(a, SendCommand) and isinstance(a.command, ReleaseStage)
    ]
    assert len(released) == 2 and not any(isinstance(action, SaveDeployment) for action in actions)


def test_a_deletion_that_the_disk_refuses_changes_nothing(ready: State) -> None:
    asked = issued(apply(ready, DeleteRequested(NAME, operation("delete"), now=1.0)))
    revision = asked.deployments[NAME].revision
    after = failed(asked, revision)
    record = after.deployments[NAME]
    assert record.phase is DeploymentPhase.READY and after.refusal(OperationId("delete")) == FULL
    assert not reconcile(after, 1.5)
    (save,) = reconcile(after, 2.0)  # the present state of the revision still has to reach the disk
    assert isinstance(save, SaveDeployment) and save.record.on_disk.phase is DeploymentPhase.READY
    settled = apply(issued(after), DeploymentSaved(NAME, "u1", revision, Epoch(1), now=2.0))
    assert settled.deployments[NAME].phase is DeploymentPhase.READY
    # And asked again, when there is room, it is deleted.
    again = issued(apply(settled, DeleteRequested(NAME, operation("delete"), now=3.0)))
    assert again.refusal(OperationId("delete")) is None
    gone = apply(
        again, DeploymentSaved(NAME, "u1", again.deployments[NAME].revision, Epoch(1), now=3.0)
    )
    assert gone.deployments[NAME].phase is DeploymentPhase.DELETING


@pytest.mark.parametrize("newer", ["saved", "refused"])
def test_of_two_writes_under_way_the_newer_decides(asked: State, newer: str) -> None:
    """The first one of a deployment is refused when a node has gone meanwhile, which has to be
    written too."""
    broken = issued(apply(asked, NodeDisconnected(NodeId("id-b"), 2, now=1.0)))
    assert broken.deployments[NAME].saving == 2
    after = failed(broken, 1)
    assert after.deployments[NAME].operations and after.refusal(OperationId("deploy")) is None
    if newer == "refused":
        assert not failed(after, 2).deployments
    else:
        saved = apply(after, DeploymentSaved(NAME, "u1", 2, Epoch(1), now=1.0))
        assert saved.deployments[NAME].durable and saved.refusal(OperationId("deploy")) is None


def test_a_write_from_before_a_deletion_does_not_delete(ready: State) -> None:
    lost = issued(apply(ready, NodeDisconnected(NodeId("id-b"), 2, now=1.0)))
    asked = issued(apply(lost, DeleteRequested(NAME, operation("delete"), now=1.0)))
    before, revision = lost.deployments[NAME].revision, asked.deployments[NAME].revision
    assert before < revision
    after = apply(asked, DeploymentSaved(NAME, "u1", before, Epoch(1), now=1.0))
    assert after.deployments[NAME].phase is DeploymentPhase.WAITING
    assert after.pending_operation(NAME, OperationId("delete")) is not None
    gone = apply(after, DeploymentSaved(NAME, "u1", revision, Epoch(1), now=1.0))
    assert gone.deployments[NAME].phase is DeploymentPhase.DELETING
