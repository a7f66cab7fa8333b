"""The events that people get for a change of the state, and changes without an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.site_events import SiteNews, news
from edgeshard_coordinator.core.values.events import (
    HeartbeatsReceived,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    NodeRemoved,
    ProfileReported,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    State,
    SuspectLink,
    fresh_progress,
)

from edgeshard.domain.control.commands import Heartbeat, ProfileReport, Registration
from edgeshard.domain.control.site import Subject
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.nodes.profile import ComputeProfile, LinkProfile, MeasuredLink

A = NodeId("id-a")
TALE = DeploymentName("tale")
LINK = LinkProfile(0.001, 1e9, 0.01, 8, 1 << 20)
STAGE = StageStatus(TALE, Epoch(1), 0, LayerRange(0, 12), StagePhase.ACTIVE)


def told(before: State, after: State) -> list[tuple[str, str]]:
    return [(item.name, item.what) for item in news(before, after)]


def test_a_node_comes_goes_and_is_removed(make_registration: Callable[..., Registration]) -> None:
    registration = replace(make_registration("a"), starting=True)
    empty = State(instance="test")
    registered = apply(empty, NodeRegistered(registration, now=1.0))
    joined = apply(registered, NodeConnected(A, registration.incarnation, 1, now=2.0))
    assert told(empty, registered) == [] and told(registered, joined) == [("a", "joined")]
    started = replace(joined, nodes={A: replace(joined.nodes[A], starting=False)})
    assert told(joined, started) == [("a", "ready")]
    beating = apply(
        started, HeartbeatsReceived((Heartbeat(A, registration.incarnation, (), 1 << 30),), now=3.0)
    )
    assert beating is not started and told(started, beating) == []
    away = apply(beating, NodeDisconnected(A, 1, now=4.0))
    assert told(beating, away) == [("a", "away")] and all(
        item.warning for item in news(beating, away)
    )
    back = replace(away, nodes={A: replace(away.nodes[A], connection=2)})
    assert told(away, back) == [("a", "connected"), ("a", "ready")]
    assert told(away, apply(away, NodeRemoved(A, now=5.0))) == [("a", "removed")]


def test_it_is_told_when_nothing_is_left_to_measure(
    make_registration: Callable[..., Registration],
    make_profile: Callable[..., ComputeProfile],
    tiny_config: dict[str, Any],
) -> None:
    state, profile = State(instance="test"), make_profile(tiny_config, 0.001)
    for number, name in enumerate(("a", "b"), 1):
        registration = make_registration(name)
        state = apply(state, NodeRegistered(registration, now=1.0))
        state = apply(
            state, NodeConnected(registration.node_id, registration.incarnation, number, now=2.0)
        )
    first, second = state.nodes
    state = replace(state, configs={profile.model_hash: tiny_config})

    def report(state: State, sender: NodeId, *receivers: NodeId, layers: bool = False) -> State:
        links = tuple(MeasuredLink(sender, receiver, LINK) for receiver in receivers)
        return apply(
            state,
            ProfileReported(
                ProfileReport(sender, None, (profile,) if layers else (), links), now=3.0
            ),
        )

    with_one = report(state, first, second, layers=True)
    with_links = report(with_one, second, first)
    assert told(state, with_one) == [] and told(with_one, with_links) == [], (
        "b lacks the layers that a has"
    )
    whole = report(with_links, second, layers=True)
    assert told(with_links, whole) == [("b", "measured")]
    again = report(whole, first, layers=True)
    assert told(whole, again) == [], "the same figures"
    assert told(again, report(again, first, second)) == [], "a link is no news by itself"
    serving = replace(
        with_links,
        nodes={**with_links.nodes, second: replace(with_links.nodes[second], stages=(STAGE,))},
    )
    assert told(with_one, serving) == [("b", "measured")], "a node that serves is not measured"


def record(
    layers: str = "a", phase: DeploymentPhase = DeploymentPhase.LOADING, **changes: Any
) -> DeploymentRecord:
    stage = PlacedStage(
        0, NodeId(f"id-{layers}"), NodeName(layers), f"{layers}:1", LayerRange(0, 12), 1, 1
    )
    placement = Placement((stage,), 16, 1, 1, 1)
    spec = parse_spec({"name": TALE, "model": "tiny", "source": "a"})
    values: dict[str, Any] = {"prepared": fresh_progress(placement), "phase": phase, **changes}
    return DeploymentRecord(
        "u1", spec, Digest("d" * 64), placement, values.pop("epoch", Epoch(1)), **values
    )


def of(record: DeploymentRecord | None) -> State:
    return State(instance="test", deployments={} if record is None else {TALE: record})


AWAY = UnavailableError("node a is away")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, record(), ["created", "loading"]),
        (record(), record(), []),
        (record(), record(phase=DeploymentPhase.READY), ["ready"]),
        (
            record(phase=DeploymentPhase.READY),
            record(phase=DeploymentPhase.WAITING, failure=AWAY),
            ["waiting"],
        ),
        (record(failure=AWAY), record(failure=UnavailableError("node b is away")), ["loading"]),
        (record("a"), record("b", epoch=Epoch(2)), ["moved"]),
        (record(), record(phase=DeploymentPhase.DELETING), ["deleting"]),
        (record(phase=DeploymentPhase.DELETING), None, ["deleted"]),
        (record(), replace(record(), uid="u2"), ["created", "loading"]),
        (record(), record(loaded_bytes=7, revision=2), []),
    ],
)
def test_a_deployment_and_its_phases(
    before: DeploymentRecord | None, after: DeploymentRecord | None, expected: list[str]
) -> None:
    assert told(of(before), of(after)) == [("tale", what) for what in expected]


def test_what_is_said_of_a_deployment() -> None:
    (ready,) = news(of(record()), of(record(phase=DeploymentPhase.READY)))
    assert ready == SiteNews(Subject.DEPLOYMENT, "tale", "ready", "epoch 1, a=0:12")
    (waiting,) = news(of(record()), of(record(phase=DeploymentPhase.WAITING, failure=AWAY)))
    assert (waiting.detail, waiting.warning) == ("node a is away", True)
    (moved,) = news(of(record("a")), of(record("b")))
    assert moved.detail == "from a=0:12 to b=0:12"


def test_a_link_that_carries_nothing_is_told_once() -> None:
    suspect = SuspectLink(TALE, Epoch(1), 0, 1, A, NodeId("id-b"), 1.0, 1.0, "no beacon for 2 s")
    clear, first = State(instance="test"), State(instance="test", suspects=(suspect,))
    (link,) = news(clear, first)
    assert (link.name, link.what, link.detail) == ("id-a -> id-b", "suspect", "no beacon for 2 s")
    assert not list(news(first, replace(first, suspects=(replace(suspect, checked_at=2.0),))))
