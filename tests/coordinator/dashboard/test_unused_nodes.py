"""The cause why a deployment has no layers on a node, for each state of nodes, specs and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.member_actions import (
    cause_of_plan,
    cause_without_plan,
    is_used,
)

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Prediction
from edgeshard.domain.ids import Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import Node
from tests.support.scripted_site import facts

PREDICTED = Prediction(0.1, 0.02, 50.0, "compute of a takes 10 ms")


def node(name: str, **fields: Any) -> Node:
    here = Node(
        node_id=NodeId(f"id-{name}"),
        name=NodeName(name),
        address="127.0.0.1:1",
        wire_version=1,
        facts=facts(),
        connected=True,
        heartbeat_age_s=0.1,
        free_bytes=1,
    )
    return replace(here, **fields)


NODES = (node("a"), node("b", labels={"zone": "hall1"}), node("c", labels={"zone": "hall2"}))


def placement(*names: str, note: str = "") -> Placement:
    stages = tuple(
        PlacedStage(
            index,
            NodeId(f"id-{name}"),
            NodeName(name),
            "127.0.0.1:1",
            LayerRange(index, index + 1),
            1,
            1,
        )
        for index, name in enumerate(names)
    )
    return Placement(stages, 16, 4, 1, 1, predicted=PREDICTED, note=note)


def deployment(**spec: Any) -> Deployment:
    whole = parse_spec({"name": "tales", "model": "m", **spec})
    return Deployment(whole, DeploymentPhase.READY, Epoch(1), placement("a"))


def test_a_node_is_used_that_has_layers() -> None:
    assert [is_used(one, deployment()) for one in NODES] == [True, False, False]


@pytest.mark.parametrize(
    ("there", "spec", "said"),
    [
        (node("b", connected=False, heartbeat_age_s=42.0), {}, "last heard of it 42 s ago"),
        (node("b", starting=True), {}, "still starting"),
        (node("b"), {"layers": "a=0:1"}, "a (0:1). Deploy it without --layers"),
        (node("b"), {"exclude": ["b"]}, "--exclude b"),
        (node("b"), {"rule": ["avoid b"]}, "would break 'avoid b'"),
        (NODES[1], {"rule": ["at-most 1 of a,b"]}, "would break 'at-most 1 of a,b'"),
        (NODES[1], {"rule": ["together by rack"]}, "rack"),
        (node("b"), {"rule": ["avoid gone"]}, "gone"),
    ],
)
def test_causes_that_need_no_plan(there: Node, spec: dict[str, Any], said: str) -> None:
    cause = cause_without_plan(there, deployment(**spec), NODES)
    assert cause is not None and said in cause.text
    assert cause.line.startswith("edgectl ")


def test_a_rule_that_is_kept_and_a_cap_are_no_cause() -> None:
    assert (
        cause_without_plan(
            NODES[1], deployment(rule=["apart b,c", "together b,c", "use c", "max-watts 10"]), NODES
        )
        is None
    )


def plan(best: Placement, gain: float | None, reason: ReplanReason, note: str = "") -> ReplanResult:
    return ReplanResult(placement("a"), best, PREDICTED, gain, reason, note)


@pytest.mark.parametrize(
    ("found", "said", "line"),
    [
        (
            plan(placement("a", "b"), 0.31, ReplanReason.WOULD_MOVE),
            "31 % better",
            "edgectl replan tales",
        ),
        (
            plan(placement("a", "b"), 0.02, ReplanReason.SMALL_GAIN),
            "less than 5 %",
            "edgectl replan tales --force",
        ),
        (
            plan(placement("a", "b"), 0.02, ReplanReason.NOTHING_NEW),
            "less than 5 %",
            "edgectl replan tales --force",
        ),
        (
            plan(placement("b"), None, ReplanReason.NOT_WEIGHED, "no figures"),
            "no figures",
            "edgectl replan tales",
        ),
        (
            plan(
                placement("a", note="Left out: b, still starting."), 0.0, ReplanReason.SAME_LAYERS
            ),
            "a (0:1) for tales. Its limit: compute of a takes 10 ms. Left out: b",
            "edgectl replan tales --dry-run",
        ),
    ],
)
def test_causes_of_a_plan(found: ReplanResult, said: str, line: str) -> None:
    cause = cause_of_plan(node("b"), "tales", found)
    assert said in cause.text and cause.line == line


def test_missing_measurements_are_named() -> None:
    cause = cause_of_plan(
        node("b", unknown_links=2), "tales", plan(placement("a"), 0.0, ReplanReason.SAME_LAYERS)
    )
    assert "2 measurements of this node are missing: run edgectl profile" in cause.text
