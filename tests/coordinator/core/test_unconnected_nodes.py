"""Nodes that register and never connect: their number is bounded, they are forgotten, and they
block no other node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.nodes import unconnected_nodes
from edgeshard_coordinator.core.values.actions import SaveMeasurements, SaveNode
from edgeshard_coordinator.core.values.events import (
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
    Ticked,
)
from edgeshard_coordinator.core.values.state import State

from edgeshard.domain.control.commands import ProfileReport, Registration
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink

MakeRegistration = Callable[..., Registration]
A, B = NodeId("id-a"), NodeId("id-b")
REPORT = ProfileReport(B, links=(MeasuredLink(B, A, LinkProfile(1e-3, 1e8, 0.0, 3, 1 << 20)),))


@pytest.fixture
def one(make_registration: MakeRegistration) -> State:
    """Node a, connected."""
    state = apply(State(instance="test"), NodeRegistered(make_registration("a"), now=1.0))
    return apply(state, NodeConnected(A, "i1", 1, now=1.0))


def flooded(state: State, make: MakeRegistration, count: int, now: float = 2.0) -> State:
    for number in range(count):
        state = apply(state, NodeRegistered(make(f"unconnected-{number}"), now=now + number / 1000))
    return state


def test_a_flood_of_ghosts_is_bounded_and_a_real_node_comes_through(
    one: State, make_registration: MakeRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unconnected_nodes, "MOST_UNCONNECTED", 20)
    state = flooded(one, make_registration, 60)
    assert len(state.nodes) == 1 + 20 and A in state.nodes, (
        "the oldest unconnected give way, nodes that connected do not"
    )
    state = apply(state, NodeRegistered(make_registration("b"), now=3.0))
    state = flooded(state, make_registration, 15, now=3.1)
    assert apply(state, NodeConnected(B, "i1", 2, now=4.0)).is_connected(B)


def test_a_ghost_is_forgotten_in_time_with_what_it_reported(
    one: State, make_registration: MakeRegistration
) -> None:
    state = apply(one, NodeRegistered(make_registration("b"), now=2.0))
    state = apply(state, ProfileReported(REPORT, now=2.0))
    limit = state.timings.unconnected_s
    assert B in apply(state, Ticked(2.0 + limit, 0)).nodes
    late = apply(state, Ticked(2.1 + limit, 0))
    assert B not in late.nodes and B not in late.measured and A in late.nodes


def test_a_node_that_connected_once_is_kept_while_it_is_away(
    one: State, make_registration: MakeRegistration
) -> None:
    away = apply(one, NodeDisconnected(A, 1, now=2.0))
    assert A in apply(away, Ticked(1000.0, 0)).nodes
    again = apply(away, NodeRegistered(make_registration("a", incarnation="i2"), now=1001.0))
    assert A in apply(again, Ticked(3000.0, 0)).nodes, (
        "it may be needed: layers may be placed on it"
    )


def test_a_ghost_is_not_on_disk_and_a_node_is_once_it_connects(
    one: State, make_registration: MakeRegistration
) -> None:
    def saves(state: State) -> set[NodeId]:
        actions = reconcile(state, 2.0)
        return {a.node.node_id for a in actions if isinstance(a, SaveNode)} | {
            a.node_id for a in actions if isinstance(a, SaveMeasurements)
        }

    state = apply(one, NodeRegistered(make_registration("b"), now=2.0))
    state = apply(state, ProfileReported(REPORT, now=2.0))
    assert saves(state) == {A}
    assert saves(apply(state, NodeConnected(B, "i1", 2, now=3.0))) == {A, B}


def test_a_site_has_so_many_boxes_and_no_more(
    one: State, make_registration: MakeRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unconnected_nodes, "MAX_NODES", 3)
    state = one
    for name in "bc":
        state = apply(state, NodeRegistered(make_registration(name), now=2.0))
        state = apply(state, NodeConnected(NodeId(f"id-{name}"), "i1", 2, now=2.0))
    with pytest.raises(ResourceExhaustedError) as refused:
        apply(state, NodeRegistered(make_registration("d"), now=3.0))
    assert (refused.value.field, refused.value.reason) == ("node_id", "TOO_MANY_NODES")
    gone = replace(state, nodes={**state.nodes, B: replace(state.nodes[B], connection=0)})
    assert (
        B in apply(gone, NodeRegistered(make_registration("b", incarnation="i2"), now=3.0)).nodes
    ), "a known one may"
    assert (
        B
        not in apply(
            gone, NodeRegistered(make_registration("b", node_id=NodeId("id-b2")), now=3.0)
        ).nodes
    )
