"""Replicas: placed on nodes of their own, deployed and deleted as one, lost one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.placement.replicated import (
    check_joins,
    computes_the_same,
    place_replicas,
    without_siblings,
)
from edgeshard_coordinator.core.values.actions import SaveDeployment
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    DeleteRequested,
    DeploymentForgotten,
    DeploymentSaved,
    DeployRequested,
    NodeConnected,
    NodeRegistered,
    SaveFailed,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    ServedOperation,
    State,
    validate_state,
)

from edgeshard.domain.deployments.deployment import DeploymentPhase, DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Prediction
from edgeshard.domain.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts

FULL = ResourceExhaustedError("the disk is full", field="state-dir", reason="DISK_FULL")
FACTS = DeviceFacts("cpu", "", 2, 1 << 30, 1 << 30, False, "test")
SPEC = parse_spec({"name": "tale", "model": "tiny", "replicas": 2})
TALE = DeploymentName("tale")
ONE = DeploymentName("tale.1")
TWO = DeploymentName("tale.2")


def placement_on(*names: str, rate: float | None = None) -> Placement:
    each = 12 // len(names)
    stages = tuple(
        PlacedStage(
            i,
            NodeId(f"id-{n}"),
            NodeName(n),
            f"{n}:1",
            LayerRange(i * each, (i + 1) * each),
            1000,
            1000,
        )
        for i, n in enumerate(names)
    )
    figures = None if rate is None else Prediction(1.0, 1.0, rate, "")
    return Placement(stages, 16, 8, 1, 1, predicted=figures)


# Placing


def candidate(name: str, connected: bool = True) -> Candidate:
    return Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:1", 1 << 30, connected, FACTS)


class Planner:
    """Uses all allowed nodes. The rate depends on their names; it is None if the nodes are other
    able ones, and an error otherwise.
    """

    def __init__(self, able: Mapping[str, float | None]) -> None:
        self.able = able

    def __call__(self, candidates: Sequence[Candidate]) -> Placement:
        names = sorted(str(node.name) for node in candidates if node.placeable)
        if "".join(names) not in self.able:
            raise ResourceExhaustedError(f"{names} are full")
        return placement_on(*names, rate=self.able["".join(names)])


def placed(spec: DeploymentSpec, able: Mapping[str, float | None], nodes: str = "abc") -> list[str]:
    found = place_replicas(spec, [candidate(name) for name in nodes], Planner(able))
    return ["".join(str(stage.node_name) for stage in placement.stages) for placement in found]


def test_replicas_get_disjoint_nodes_with_the_highest_rate_together() -> None:
    able = {"a": 9.0, "b": 5.0, "ab": 11.0, "bc": 6.0, "ac": 10.0, "abc": 13.0}
    assert placed(SPEC, able) == ["a", "bc"]
    assert placed(replace(SPEC, replicas=0), able) == ["a", "bc"], (
        "a mixture beats both pure choices"
    )
    assert placed(replace(SPEC, replicas=0), able | {"abc": 16.0}) == ["abc"]
    assert placed(replace(SPEC, replicas=0), able | {"c": 4.0}) == ["a", "b", "c"]


def test_without_figures_the_number_is_kept_and_auto_is_one_pipeline() -> None:
    able = dict.fromkeys(("a", "b", "c", "ab", "ac", "bc", "abc"))
    assert placed(SPEC, able) == ["a", "b"]
    (single,) = place_replicas(
        replace(SPEC, replicas=0), [candidate(name) for name in "ab"], Planner(able)
    )
    assert "without measurements" in single.note


def test_more_replicas_than_fit_are_refused_by_name() -> None:
    with pytest.raises(ResourceExhaustedError, match="do not hold 2 pipelines of tiny") as refused:
        placed(SPEC, {"ab": 1.0, "bc": 1.0, "ac": 1.0, "abc": 1.0})
    assert refused.value.field == "replicas"
    with pytest.raises(ResourceExhaustedError, match="are full"):
        placed(SPEC, {})
    with pytest.raises(UnavailableError):
        place_replicas(SPEC, [candidate("a", connected=False)], Planner({}))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"layers": "a=0:12"}, "layers"),
        ({"source": "a"}, "source"),
        ({"replicas": "auto", "objective": "latency"}, "replicas"),
        ({"replicas": 4097}, "replicas"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": "many"}, "replicas"),
        ({"replica": 4097}, "replica"),
        ({"name": "n" * 62}, "name"),
    ],
)
def test_what_replicas_cannot_be_is_refused_by_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_spec({"name": "tale", "model": "tiny", "replicas": 2} | wrong)
    assert refused.value.field == field


def test_names_of_replicas_are_numbered_and_lead_back() -> None:
    numbered = SPEC.numbered(2)
    assert [spec.name for spec in numbered] == ["tale.1", "tale.2"]
    assert {spec.served_name for spec in numbered} == {"tale"}
    assert numbered[1].replica_names == ("tale.1", "tale.2")
    (alone,) = parse_spec({"name": "tale.2", "model": "tiny", "replicas": "auto"}).numbered(1)
    assert (alone.name, alone.served_name, alone.replicas, alone.replica_names) == (
        "tale.2",
        "tale.2",
        1,
        ("tale.2",),
    )


# The state


def operation(name: str) -> ServedOperation:
    return ServedOperation(OperationId(name), "f", b"")


def issued(state: State) -> State:
    while actions := reconcile(state, 1.0):
        for action in actions:
            state = apply(state, ActionIssued(action, now=1.0))
    return state


def saved(state: State, name: DeploymentName) -> State:
    record = state.deployments[name]
    after = apply(state, DeploymentSaved(name, record.uid, record.revision, record.epoch, now=1.0))
    validate_state(after)
    return after


def refused(state: State, name: DeploymentName) -> State:
    record = state.deployments[name]
    after = apply(state, SaveFailed(name, record.uid, record.revision, FULL, 1.0, now=1.0))
    validate_state(after)
    return after


@pytest.fixture
def deploying(make_registration: Any) -> State:
    """Two replicas were asked for."""
    state = State(instance="test")
    for number, name in enumerate("abc", 1):
        state = apply(state, NodeRegistered(make_registration(name), now=0.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", number, now=0.0))
    state = issued(state)
    one, two = (
        new_record(
            state,
            DeploymentRecord(f"u{name}", spec, Digest("d" * 64), placement_on(name), Epoch(0)),
        )
        for spec, name in zip(SPEC.numbered(2), "ab", strict=True)
    )
    event = DeployRequested(two, state.version, operation("deploy"), now=1.0, others=(one,))
    return apply(state, event)


@pytest.fixture
def asked(deploying: State) -> State:
    """The same, and their save is under way."""
    return issued(deploying)


def saves(state: State, now: float = 1.0) -> list[list[str]]:
    """The names in each write that is due, in their order."""
    due = [action for action in reconcile(state, now) if isinstance(action, SaveDeployment)]
    return [[record.name for record in action.records] for action in due]


def test_replicas_are_saved_together_and_the_last_one_carries_the_call(
    deploying: State, asked: State
) -> None:
    assert saves(deploying) == [[ONE, TWO]] and saves(asked) == []
    assert (
        list(asked.deployments) == [ONE, TWO] == [record.name for record in asked.replicas_of(TALE)]
    )
    assert asked.pending_operation(TALE, OperationId("deploy")) is not None
    assert not asked.deployments[ONE].operations
    assert saved(saved(asked, ONE), TWO).pending_operation(TALE, OperationId("deploy")) is None


def test_where_the_disk_refuses_replicas_none_is_left(asked: State) -> None:
    """The write was of all of them, and the call has changed nothing."""
    state = refused(refused(asked, ONE), TWO)
    assert not state.deployments and not reconcile(state, 9.0)
    assert state.refusal(OperationId("deploy")) == FULL


def test_a_replica_that_is_deleted_while_the_first_write_is_under_way_takes_no_other_along(
    asked: State,
) -> None:
    """Whether the disk then takes that write or refuses it: one is gone, and the other is as the
    call requested."""
    state = apply(asked, DeleteRequested(ONE, operation("delete"), now=1.0))
    assert saves(state) == [[ONE]]
    state = issued(state)
    none = saved(apply(refused(state, TWO), SaveFailed(ONE, "ua", 1, FULL, 1.0, now=1.0)), ONE)
    assert [record.phase for record in none.deployments.values()] == ["deleting"]
    both = saved(apply(saved(state, TWO), DeploymentSaved(ONE, "ua", 1, Epoch(1), now=1.0)), ONE)
    assert [record.phase for record in both.deployments.values()] == ["deleting", "loading"]


def joining(state: State, **changes: Any) -> DeployRequested:
    """The second replica, alone."""
    spec = replace(SPEC.numbered(2)[1], **changes)
    record = new_record(
        state, DeploymentRecord("u9", spec, Digest("d" * 64), placement_on("c"), Epoch(0))
    )
    return DeployRequested(record, state.version, operation("again"), now=2.0)


def test_a_replica_that_is_gone_joins_the_others_and_is_saved_alone(asked: State) -> None:
    state = saved(saved(asked, ONE), TWO)
    with pytest.raises(AlreadyExistsError):
        apply(state, joining(state))
    state = saved(issued(apply(state, DeleteRequested(TWO, operation("delete"), now=1.0))), TWO)
    state = apply(state, DeploymentForgotten(TWO, "ub", now=1.0))
    assert list(state.deployments) == [ONE]
    after = apply(state, joining(state))
    assert list(after.deployments) == [ONE, TWO] and saves(after, 2.0) == [[TWO]]
    assert after.deployments[TWO].epoch > asked.deployments[TWO].epoch
    gone = saved(issued(apply(state, DeleteRequested(ONE, operation("all"), now=1.0))), ONE)
    with pytest.raises(NotFoundError):
        apply(gone, joining(gone))


def test_only_a_replica_like_the_others_can_join_them(asked: State) -> None:
    one = asked.deployments[ONE]
    second = SPEC.numbered(2)[1]
    digest = Digest("d" * 64)
    check_joins(replace(second, source="c"), digest, [one])
    with pytest.raises(InvalidArgumentError, match="the coordinator numbers replicas"):
        check_joins(second, digest, [])
    deleting = [replace(one, phase=DeploymentPhase.DELETING), replace(one, delete_revision=1)]
    for others, spec in ((deleting, second), ([one], replace(second, name="tale.3", replica=3))):
        with pytest.raises(InvalidArgumentError, match="the coordinator numbers replicas"):
            check_joins(spec, digest, others)
    for changes, field in (
        ({"concurrency": 2}, "concurrency"),
        ({"prefix_cache": True}, "prefix_cache"),
    ):
        with pytest.raises(FailedPreconditionError) as refused:
            check_joins(replace(second, **changes), digest, [one])
        assert refused.value.field == field and refused.value.reason == "SPEC_DIFFERS"
    with pytest.raises(FailedPreconditionError, match="model: "):
        check_joins(second, Digest("e" * 64), [one])


def test_one_name_is_deleted_as_one_and_a_replica_alone(asked: State) -> None:
    state = saved(saved(asked, ONE), TWO)
    alone = apply(state, DeleteRequested(TWO, operation("delete"), now=1.0))
    assert [bool(record.delete_revision) for record in alone.deployments.values()] == [False, True]
    both = apply(state, DeleteRequested(TALE, operation("delete"), now=1.0))
    assert saves(alone) == [[TWO]] and saves(both) == [[ONE, TWO]]
    assert all(record.delete_revision for record in both.deployments.values())
    assert both.pending_operation(TALE, OperationId("delete")) is not None
    assert saved(issued(both), ONE).pending_operation(TALE, OperationId("delete")) is not None
    done = saved(saved(issued(both), ONE), TWO)
    assert done.pending_operation(TALE, OperationId("delete")) is None


def test_a_name_is_taken_by_its_replicas_and_theirs_by_others(asked: State) -> None:
    for name in ("tale", "tale.2"):
        spec = parse_spec({"name": name, "model": "tiny"})
        record = new_record(
            asked, DeploymentRecord("u9", spec, Digest("d" * 64), placement_on("c"), Epoch(0))
        )
        with pytest.raises(AlreadyExistsError):
            apply(asked, DeployRequested(record, asked.version, operation("again"), now=2.0))


def test_a_replica_is_never_repaired_onto_the_node_of_another(asked: State) -> None:
    nodes = without_siblings(asked, asked.deployments[ONE].spec, asked.candidates(ONE))
    assert {str(node.name): node.connected for node in nodes} == {"a": True, "b": False, "c": True}


def test_replicas_compute_the_same_where_bits_and_forms_are_the_same(asked: State) -> None:
    def compare(prints: Mapping[str, str], **changes: Any) -> bool:
        state, spec = asked, replace(SPEC, **changes)
        for name, told in prints.items():
            node = state.nodes[NodeId(f"id-{name}")]
            state = state.with_node(replace(node, facts=replace(node.facts, bits_fingerprint=told)))
        one, two = (
            replace(state.deployments[name], spec=numbered)
            for name, numbered in zip((ONE, TWO), spec.numbered(2), strict=True)
        )
        return computes_the_same(state, one, two)

    assert compare({"a": "x", "b": "x"})
    assert not compare({"a": "x", "b": "y"}) and not compare({"a": "", "b": ""})
    assert compare({"a": "x", "b": "x"}, quantisation={"*": IntegerFormat.INT8})
    assert not compare({"a": "x", "b": "x"}, quantisation={"a": IntegerFormat.INT8})
