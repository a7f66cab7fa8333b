"""Labels of nodes against a real coordinator over real sockets and a real disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.values.events import NodeConnected, NodeLabelled, NodeRegistered
from edgeshard_coordinator.core.values.state import State, Timings

from edgeshard.client import Client
from edgeshard.domain.control.commands import Registration
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.domain.ids import NodeId


async def test_an_operator_sets_and_removes_labels_and_the_audit_log_says_so(site: Any) -> None:
    await site.connected("a")
    async with Client(site.address) as client:
        node = await client.label_node("a", {"zone": "hall1", "gpu": "no"})
        assert node.labels == {"zone": "hall1", "gpu": "no"}
        node = await client.label_node(node.node_id, {"zone": "hall2"}, ["gpu"])
        assert node.labels == (await client.node("a")).labels == {"zone": "hall2"}
        with pytest.raises(InvalidArgumentError) as refused:
            await client.label_node("a", {"zone": "hall 3"})
        assert refused.value.field == "labels" and (await client.node("a")).labels == {
            "zone": "hall2"
        }
        with pytest.raises(NotFoundError):
            await client.label_node("b", {"zone": "hall1"})
        entries = [entry for entry in await client.audit() if entry.what == "LabelNode"]
        assert entries and entries[0].target == "a"


def registered(state: State, registration: Registration) -> State:
    return apply(state, NodeRegistered(registration, 1.0))


def test_an_operators_labels_come_first_and_those_of_the_agent_that_are_removed_stay_so(
    make_registration: Any,
) -> None:
    own = make_registration("a", labels={"zone": "hall1", "gpu": "yes"})
    state = registered(State("i"), own)
    state = apply(state, NodeConnected(own.node_id, own.incarnation, 1, 1.0))
    version = state.version
    state = apply(state, NodeLabelled(own.node_id, {"zone": "hall9", "rack": "r1"}, ("gpu",), 2.0))
    assert (
        state.nodes[own.node_id].labels == {"zone": "hall9", "rack": "r1"}
        and state.version > version
    )
    again = make_registration(
        "a", incarnation="next", labels={"zone": "hall1", "gpu": "yes", "floor": "2"}
    )
    state = registered(state, again)
    assert state.nodes[own.node_id].labels == {"zone": "hall9", "rack": "r1", "floor": "2"}
    state = apply(state, NodeLabelled(own.node_id, {}, ("zone", "rack"), 3.0))
    assert state.nodes[own.node_id].labels == {"floor": "2"}
    anew = make_registration(
        "a", node_id=NodeId("other"), incarnation="third", labels={"gpu": "yes"}
    )
    assert registered(state, anew).nodes[NodeId("other")].labels == {}, "it is the same node"


async def test_labels_outlive_a_restart_of_the_coordinator(
    tmp_path: Path, make_registration: Any
) -> None:
    own = make_registration("a", labels={"zone": "hall1"})
    node = registered(State("i"), own).nodes[own.node_id].relabelled({"rack": "r1"}, ("zone",))
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("i", Timings(), 0.0)
    await store.save_node(node)
    await store.close()
    store = StateStore(tmp_path / "state.sqlite")
    state = await store.open("i", Timings(), 0.0)
    assert state.nodes[own.node_id].labels == {"rack": "r1"}
    assert state.nodes[own.node_id].set_labels == {"zone": None, "rack": "r1"}
    await store.close()
