"""Nodes that register, connect and report their state: which process counts under a name, and its
stored data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.nodes.node_events import LATE_S, check_is_alone
from edgeshard_coordinator.core.values.actions import (
    Action,
    ReleaseOrphans,
    SaveNode,
    TellUnknownStages,
)
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    HeartbeatsReceived,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
)
from edgeshard_coordinator.core.values.state import State, node_view

from edgeshard.debugging.ring import rough_bytes
from edgeshard.domain.control.commands import (
    IDLE_INTERVAL_S,
    MOST_STAGES,
    Heartbeat,
    Registration,
    ReleaseStage,
)
from edgeshard.domain.errors import AlreadyExistsError, NotFoundError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import HugePages, StagePhase, StageStatus

MakeRegistration = Callable[..., Registration]
A, OTHER = NodeId("id-a"), NodeId("id-other")
STAGE = StageStatus(DeploymentName("tale"), Epoch(3), 0, LayerRange(0, 6), StagePhase.READY)


def registered(state: State, registration: Registration) -> State:
    return apply(state, NodeRegistered(registration, now=1.0))


@pytest.fixture
def one(make_registration: MakeRegistration) -> State:
    """Node a, connected over stream 1 and saved."""
    state = apply(
        registered(State(instance="test"), make_registration("a")),
        NodeConnected(A, "i1", 1, now=1.0),
    )
    return replace(state, nodes={A: replace(state.nodes[A], saved=True)})


def test_a_name_is_that_of_the_connected_node(
    one: State, make_registration: MakeRegistration
) -> None:
    second = replace(make_registration("a"), node_id=OTHER)
    with pytest.raises(AlreadyExistsError) as refused:
        registered(one, second)
    assert refused.value.field == "name"
    alone = apply(one, NodeDisconnected(A, 1, now=2.0))
    assert set(registered(alone, second).nodes) == {OTHER}, (
        "a node that is gone gives its name to another"
    )


def test_of_two_nodes_that_registered_under_one_name_one_connects(
    one: State, make_registration: MakeRegistration
) -> None:
    """Both registered while neither was connected; the first has come back since under its old
    registration."""
    both = replace(
        one, nodes={**one.nodes, OTHER: replace(one.nodes[A], node_id=OTHER, connection=0)}
    )
    with pytest.raises(AlreadyExistsError):
        apply(both, NodeConnected(OTHER, "i1", 2, now=2.0))
    assert apply(both, NodeConnected(A, "i1", 2, now=2.0)).nodes[A].connection == 2, (
        "its own stream again"
    )


@pytest.mark.parametrize(("node_id", "incarnation"), [(A, "i2"), (OTHER, "i1")])
def test_a_node_is_heard_only_as_it_registered(
    one: State, node_id: NodeId, incarnation: str
) -> None:
    with pytest.raises(NotFoundError) as refused:
        apply(one, NodeConnected(node_id, incarnation, 2, now=2.0))
    assert refused.value.field == "node_id"
    assert (
        apply(one, HeartbeatsReceived((Heartbeat(node_id, incarnation, (STAGE,), 0),), now=2.0))
        == one
    )


def test_of_heartbeats_together_each_counts_for_its_own_node(
    one: State, make_registration: MakeRegistration
) -> None:
    """Also together with a heartbeat of an absent node, and of an unknown node."""
    state = apply(
        registered(one, make_registration("b")), NodeConnected(NodeId("id-b"), "i1", 2, now=1.0)
    )
    state = registered(state, make_registration("c"))
    beats = tuple(Heartbeat(NodeId(f"id-{name}"), "i1", (STAGE,), 0) for name in "abcd")
    state = apply(state, HeartbeatsReceived(beats, now=2.0))
    assert {node.name: (node.heard_at, node.stages) for node in state.nodes.values()} == {
        "a": (2.0, (STAGE,)),
        "b": (2.0, (STAGE,)),
        "c": (1.0, ()),
    }


def test_the_same_process_keeps_its_stream_and_another_begins_anew(
    one: State, make_registration: MakeRegistration
) -> None:
    pages = HugePages(1 << 30, 1 << 29)
    holding = apply(one, HeartbeatsReceived((Heartbeat(A, "i1", (STAGE,), 0, pages),), now=2.0))
    assert node_view(holding, holding.nodes[A], 2.0).huge_pages == pages
    same = registered(holding, make_registration("a")).nodes[A]
    assert (same.connection, same.stages, same.huge_pages, same.saved) == (1, (STAGE,), pages, True)
    another = registered(holding, make_registration("a", incarnation="i2")).nodes[A]
    assert (another.connection, another.stages, another.huge_pages) == (0, (), None)
    away = apply(holding, NodeDisconnected(A, 1, now=3.0)).nodes[A]
    assert (away.stages, away.huge_pages) == ((), None)


@pytest.mark.parametrize("change", [{}, {"address": "a:9999"}, {"name": "b"}])
def test_what_is_said_anew_is_saved_anew(
    one: State, make_registration: MakeRegistration, change: dict[str, Any]
) -> None:
    new = replace(make_registration("a"), **change)
    state = registered(one, new)
    assert state.nodes[A].address == new.address and state.nodes[A].name == new.name
    saving = [action for action in reconcile(state, 2.0) if isinstance(action, SaveNode)]
    assert bool(saving) == bool(change)


def test_an_older_stream_that_ends_says_nothing(one: State) -> None:
    newer = apply(one, NodeConnected(A, "i1", 2, now=2.0))
    assert apply(newer, NodeDisconnected(A, 1, now=3.0)).nodes[A].connection == 2
    assert apply(newer, NodeDisconnected(A, 2, now=3.0)).nodes[A].connection == 0


@pytest.mark.parametrize("stages", [(), (STAGE,), (STAGE,) * 5])
def test_what_heartbeats_take_in_memory_is_about_what_they_say(
    stages: tuple[StageStatus, ...],
) -> None:
    """The ring of events goes by it."""
    event = HeartbeatsReceived(
        (Heartbeat(A, "i1", stages, 1 << 30, HugePages(1 << 30, 1 << 29)),) * 20, now=2.0
    )
    walked = rough_bytes(event.heartbeats, 1 << 30)
    assert walked / 2 < event.rough_bytes < 2 * walked


# Stages of no deployment


def holding(state: State, *held: tuple[str, int], now: float = 2.0) -> State:
    """Node a reports that it holds these stages, at these epochs."""
    stages = tuple(
        replace(STAGE, deployment=DeploymentName(name), epoch=Epoch(epoch)) for name, epoch in held
    )
    return apply(state, HeartbeatsReceived((Heartbeat(A, "i1", stages, 0),), now))


def settled(state: State) -> tuple[State, list[Action]]:
    """Issue every action until none is due."""
    issued: list[Action] = []
    while actions := reconcile(state, 2.0):
        for action in actions:
            state = apply(state, ActionIssued(action, now=2.0))
        issued += actions
    return state, issued


def test_stages_of_deleted_deployments_are_released_and_those_of_unknown_ones_are_not(
    one: State,
) -> None:
    """An epoch above the last one of a deleted deployment was given by a coordinator that knew more
    than this one."""
    state = replace(one, retired={DeploymentName("tale"): Epoch(5)})
    state, issued = settled(holding(state, ("tale", 3), ("tale", 5), ("tale", 6), ("poem", 1)))
    release, strangers = issued
    assert isinstance(release, ReleaseOrphans) and isinstance(strangers, TellUnknownStages)
    assert [command.command for command in release.commands] == [
        ReleaseStage(DeploymentName("tale"), Epoch(epoch)) for epoch in (3, 5)
    ]
    assert strangers.stages == (("tale", 6), ("poem", 1))
    assert len(node_view(state, state.nodes[A], 2.0).stages) == 4, "they are shown as they are"


def test_each_is_said_once_for_each_connection(
    one: State, make_registration: MakeRegistration
) -> None:
    held = (("tale", 3), ("poem", 1))
    state, issued = settled(
        holding(replace(one, retired={DeploymentName("tale"): Epoch(5)}), *held)
    )
    assert [type(action) for action in issued] == [ReleaseOrphans, TellUnknownStages]
    state, issued = settled(holding(state, *held, ("poem", 2)))
    assert issued == [], "the node may not have heard of it yet"
    state = registered(state, make_registration("a"))
    state, issued = settled(holding(state, *held))
    assert issued == [], "the stream goes on"
    state = apply(apply(state, NodeDisconnected(A, 1, now=2.0)), NodeConnected(A, "i1", 2, now=2.0))
    state, issued = settled(holding(state, *held))
    assert [type(action) for action in issued] == [ReleaseOrphans, TellUnknownStages]


def test_what_was_released_is_forgotten_once_the_node_names_it_no_more(one: State) -> None:
    state, _ = settled(
        holding(replace(one, retired={DeploymentName("tale"): Epoch(5)}), ("tale", 3), ("tale", 4))
    )
    assert state.nodes[A].released == {("tale", 3), ("tale", 4)}
    assert holding(state, ("tale", 4)).nodes[A].released == {("tale", 4)}
    assert holding(state).nodes[A].released == frozenset()


def test_thousands_of_orphans_are_one_action(one: State) -> None:
    """Each action copies its node's pending releases: one action for each orphan would copy them
    each time."""
    held = [(f"d{number}", 1) for number in range(MOST_STAGES)]
    state = replace(one, retired={DeploymentName(name): Epoch(1) for name, _ in held})
    began = time.process_time()
    state, issued = settled(holding(state, *held))
    assert time.process_time() - began < 1.0
    (release,) = issued
    assert isinstance(release, ReleaseOrphans) and len(release.commands) == MOST_STAGES
    assert len({command.operation_id for command in release.commands}) == MOST_STAGES
    assert len(state.nodes[A].released) == MOST_STAGES


def test_a_deployment_that_is_gone_makes_orphans_of_nodes_of_which_nothing_changed(
    one: State,
) -> None:
    """A node that is not looked at by itself, because nothing was due of it before."""
    rested, _ = settled(holding(one, ("tale", 3)))
    state = replace(rested, retired={DeploymentName("tale"): Epoch(5)})
    (release,) = reconcile(state, 2.0, rested)
    assert isinstance(release, ReleaseOrphans) and release.stages == (("tale", 3),)


@pytest.mark.parametrize(
    ("incarnation", "silent_s", "is_refused"),
    [("i2", 0.5, True), ("i1", 0.5, False), ("i2", IDLE_INTERVAL_S + LATE_S + 0.1, False)],
)
def test_a_second_process_of_a_node_that_is_alive_is_refused(
    one: State,
    make_registration: MakeRegistration,
    incarnation: str,
    silent_s: float,
    is_refused: bool,
) -> None:
    node = replace(one.nodes[A], heard_at=100.0)
    new = replace(make_registration("a"), incarnation=incarnation)
    if is_refused:
        with pytest.raises(
            UnavailableError, match="another agent with the identity of node a"
        ) as caught:
            check_is_alone(node, new, 100.0 + silent_s)
        assert caught.value.reason == "IDENTITY_IN_USE" and caught.value.retry_after_s
    else:
        check_is_alone(node, new, 100.0 + silent_s)
    check_is_alone(replace(node, connection=0), new, 100.0 + silent_s)
