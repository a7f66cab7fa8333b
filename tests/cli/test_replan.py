"""edgectl replan, against a scripted site."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Prediction
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.proto.v1 import admin_pb2


def figures(time_per_token_s: float) -> Prediction:
    return Prediction(
        0.1,
        time_per_token_s,
        1 / time_per_token_s,
        "node a",
        objective="latency",
        requests=1,
        prompt_tokens=128,
        new_tokens=64,
    )


def wider(placement: Placement) -> Placement:
    """With a third node after the two."""
    last = PlacedStage(
        2, NodeId("id-c"), NodeName("c"), "127.0.0.1:7003", LayerRange(9, 12), 1 << 20, 1 << 18
    )
    return replace(placement, stages=(*placement.stages, last), predicted=figures(0.03))


@pytest.fixture
def found(site: Any) -> ReplanResult:
    plan = ReplanResult(
        site.placement, wider(site.placement), figures(0.04), 0.25, ReplanReason.MOVED
    )
    site.replan = plan
    ready = site.deployment_in(DeploymentPhase.READY)
    site.states = [ready, site.deployment_in(DeploymentPhase.LOADING), moved(site)]
    return plan


def moved(site: Any) -> Deployment:
    ready: Deployment = site.deployment_in(DeploymentPhase.READY)
    return replace(ready, placement=wider(site.placement))


def asked(site: Any) -> Any:
    (request,) = site.sent(admin_pb2.ReplanRequest)
    return request


def test_a_move_is_a_table_of_nodes_and_two_rates(
    edgectl: Any, site: Any, found: ReplanResult
) -> None:
    result = edgectl("replan", "tales")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["NODE", "LAYERS", "NOW", "THEN"],
        ["a", "0:4", "0:4"],
        ["b", "4:9", "4:9"],
        ["c", "-", "9:12"],
    ]
    assert lines[5:8] == [
        "Now:  25.00 tokens/s, 40.0 ms per token",
        "Then: 33.33 tokens/s, 30.0 ms per token",
        "Gain: 25.0 % (latency, one request of 128 tokens in and 64 out)",
    ]
    assert lines[-1] == "tales moved to a=0:4,b=4:9,c=9:12."
    assert [line for line in result.stderr.splitlines() if line.startswith("tales: ")] == [
        "tales: loading",
        "tales: ready",
    ]
    request = asked(site)
    assert request.operation_id and not request.dry_run and not request.force


def test_a_dry_run_asks_and_does_not_wait(edgectl: Any, site: Any, found: ReplanResult) -> None:
    site.replan = replace(found, reason=ReplanReason.WOULD_MOVE)
    result = edgectl("replan", "tales", "--dry-run", "--force", "-o", "json")
    data = json.loads(result.stdout)
    assert data["changed"] is False and data["reason"] == "WOULD_MOVE" and data["gain"] == 0.25
    assert (
        data["expected"]["time_per_token_s"] == 0.04
        and data["found"]["predicted"]["time_per_token_s"] == 0.03
    )
    request = asked(site)
    assert request.dry_run and request.force and not request.operation_id
    assert len(site.sent(admin_pb2.GetDeploymentRequest)) == 1, "whether it has replicas"


@pytest.mark.parametrize(
    "reason", [r for r in ReplanReason if r not in (ReplanReason.MOVED, ReplanReason.WOULD_MOVE)]
)
def test_what_stays_says_why_and_is_no_failure(
    edgectl: Any, site: Any, found: ReplanResult, reason: ReplanReason
) -> None:
    site.replan = replace(
        found, reason=reason, gain=None, expected=None, note="node c was not measured"
    )
    result = edgectl("replan", "tales")
    assert result.exit_code == 0
    assert "not predicted" in result.stdout and "node c was not measured" in result.stdout
    assert "tales stays: " in result.stdout.splitlines()[-1]


def test_a_deployment_that_could_not_move_fails_and_says_where_it_is(
    edgectl: Any, site: Any, found: ReplanResult
) -> None:
    lost = UnavailableError(
        "node c disconnected while deployment tales was loading", reason="NODE_LOST"
    )
    site.states = [
        site.deployment_in(DeploymentPhase.LOADING),
        site.deployment_in(DeploymentPhase.WAITING, lost),
        site.deployment_in(DeploymentPhase.READY),
    ]
    result = edgectl("replan", "tales")
    assert result.exit_code == 1
    assert "did not move (node c disconnected while deployment tales was loading)" in result.stderr
    assert "stays on a=0:4,b=4:9" in result.stderr


def test_without_waiting_it_is_only_asked(edgectl: Any, site: Any, found: ReplanResult) -> None:
    result = edgectl("replan", "tales", "--no-wait")
    assert (
        result.exit_code == 0
        and result.stdout.splitlines()[-1] == "tales moves to a=0:4,b=4:9,c=9:12."
    )
    assert len(site.sent(admin_pb2.GetDeploymentRequest)) == 1, "whether it has replicas"


def test_of_a_name_with_replicas_each_is_planned_and_moved(
    edgectl: Any, site: Any, found: ReplanResult
) -> None:
    site.replicate(2)
    site.replan = replace(found, found=site.placement, reason=ReplanReason.MOVED)
    result = edgectl("replan", "tales")
    assert result.exit_code == 0, result.stderr
    assert [request.name for request in site.sent(admin_pb2.ReplanRequest)] == [
        "tales.1",
        "tales.2",
    ]
    sentences = [line for line in result.stdout.splitlines() if line.startswith("tales")]
    assert sentences == ["tales.1 moved to a=0:4,b=4:9.", "tales.2 moved to a=0:4,b=4:9."]
    data = json.loads(edgectl("replan", "tales", "-o", "json").stdout)
    assert [one["changed"] for one in data] == [True, True]
    one = json.loads(edgectl("replan", "tales.2", "-o", "json").stdout)
    assert one["changed"] and site.sent(admin_pb2.ReplanRequest)[-1].name == "tales.2"
