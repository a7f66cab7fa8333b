"""The gain of a running deployment from other nodes: computed from the same figures, and an error
if it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.fresh_plan import judged, planned_again
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.traffic import NO_TRAFFIC
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import LinkProfile

MIB = 1 << 20
SPEC = parse_spec(
    {"name": "tale", "model": "tiny", "source": "a", "dtype": "float32", "concurrency": 4}
)
PLACER = PlanningPlacer()
Afresh = Callable[..., ReplanResult]


def node(name: str, **changes: Any) -> Candidate:
    facts = DeviceFacts("cpu", "some CPU", 2, 1024 * MIB, 1024 * MIB, False, "test", "bits")
    return replace(
        Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", 1024 * MIB, True, facts),
        **changes,
    )


@pytest.fixture(scope="module")
def manifest(make_manifest: Callable[..., ModelManifest]) -> ModelManifest:
    return make_manifest()


@pytest.fixture(scope="module")
def measured(
    make_profile: Any, manifest: ModelManifest
) -> Callable[..., Mapping[NodeId, Measurements]]:
    def make(**block_s: float) -> Mapping[NodeId, Measurements]:
        """Blocks of the given seconds by node, and links between all of them."""
        link = Reported(LinkProfile(1e-4, 1e9, 0.0, 9, 1 << 20), 0.0)
        profiles = {
            name: make_profile(manifest.config, seconds, DType.FLOAT32)
            for name, seconds in block_s.items()
        }
        return {
            NodeId(f"id-{name}"): Measurements(
                {key_of(profile): Reported(profile, 0.0)},
                {NodeId(f"id-{other}"): link for other in block_s if other != name},
            )
            for name, profile in profiles.items()
        }

    return make


@pytest.fixture(scope="module")
def afresh(manifest: ModelManifest) -> Afresh:
    def plan(
        current: Placement, candidates: Sequence[Candidate], known: Any, spec: Any = SPEC
    ) -> ReplanResult:
        return planned_again(
            PLACER, PlacementProblem(spec, manifest, candidates, known, NO_TRAFFIC), current
        )

    return plan


@pytest.fixture(scope="module")
def on_a(manifest: ModelManifest, measured: Any) -> Placement:
    """Planned when node a was the only one."""
    return PLACER.place(PlacementProblem(SPEC, manifest, [node("a")], measured(a=0.01)))


def nodes(placement: Placement) -> list[str]:
    return [stage.node_name for stage in placement.stages]


def test_a_fast_node_that_has_come_is_worth_a_move(
    on_a: Placement, afresh: Afresh, measured: Any
) -> None:
    plan = afresh(on_a, [node("a"), node("b")], measured(a=0.01, b=0.001))
    assert plan.current is on_a and nodes(plan.found) == ["a", "b"]
    assert plan.expected is not None and plan.found.predicted is not None and plan.gain is not None
    assert plan.gain == plan.expected.gain_of(plan.found.predicted) > 0.05
    assert plan.reason is ReplanReason.WOULD_MOVE and "same bits" in plan.found.note


def test_the_placement_that_it_has_is_weighed_by_figures_of_now(
    on_a: Placement, afresh: Afresh, measured: Any
) -> None:
    """Not the figures from the time when it was planned."""
    plan = afresh(on_a, [node("a"), node("b")], measured(a=0.03, b=0.001))
    assert plan.expected is not None and on_a.predicted is not None
    assert plan.expected.time_per_token_s > 2 * on_a.predicted.time_per_token_s


def test_a_small_gain_moves_nothing_unless_it_is_forced(
    on_a: Placement, afresh: Afresh, measured: Any, manifest: ModelManifest
) -> None:
    plan = afresh(on_a, [node("a"), node("b")], measured(a=0.01, b=0.001))
    little = replace(plan, gain=0.049)
    assert judged(little).reason is ReplanReason.SMALL_GAIN
    assert judged(little, force=True).reason is ReplanReason.WOULD_MOVE
    assert judged(replace(plan, gain=0.05)).reason is ReplanReason.WOULD_MOVE
    assert judged(replace(plan, gain=None)).reason is ReplanReason.NOT_WEIGHED


def test_the_same_layers_stay_also_when_it_is_forced(
    on_a: Placement, afresh: Afresh, measured: Any
) -> None:
    plan = afresh(on_a, [node("a"), node("b")], measured(a=0.001, b=1.0))
    assert (
        nodes(plan.found) == ["a"] and plan.reason is ReplanReason.SAME_LAYERS and plan.gain == 0.0
    )
    assert judged(plan, force=True).reason is ReplanReason.SAME_LAYERS


def test_what_cannot_be_predicted_is_not_weighed_and_says_why(
    on_a: Placement, afresh: Afresh
) -> None:
    (stage,) = on_a.stages
    tight = node("a", free_bytes=stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes - 1)
    plan = afresh(replace(on_a, predicted=None), [tight, node("b")], {})
    assert plan.reason is ReplanReason.NOT_WEIGHED and plan.gain is None
    assert "has not measured" in plan.note or "memory" in plan.note


def test_what_was_predicted_stands_where_it_does_not_fit_as_it_would_be_placed_by_hand(
    afresh: Afresh, measured: Any, manifest: ModelManifest
) -> None:
    """Placed by hand, the pool holds all requests at their longest; a plan may have placed it for
    fewer."""
    alone = PLACER.place(PlacementProblem(SPEC, manifest, [node("a")], {}))
    need = sum(s.parameter_bytes + s.kv_bytes + s.workspace_bytes for s in alone.stages)
    tight = node("a", free_bytes=need - alone.stages[0].kv_bytes // 4)
    current = PLACER.place(PlacementProblem(SPEC, manifest, [tight], measured(a=0.01)))
    assert current.kv_blocks < alone.kv_blocks
    by_hand = replace(SPEC, layers=parse_spec({**_VALUES, "layers": "a=0:12"}).layers)
    with pytest.raises(ResourceExhaustedError):
        PLACER.place(PlacementProblem(by_hand, manifest, [tight], measured(a=0.01)))
    plan = afresh(current, [tight, node("b")], measured(a=0.01, b=0.001))
    assert plan.expected == current.predicted and plan.gain is not None and plan.gain > 0.05


_VALUES = {"name": "tale", "model": "tiny", "source": "a"}


def test_while_the_source_is_away_the_node_with_the_head_is_the_source(
    afresh: Afresh, measured: Any, manifest: ModelManifest
) -> None:
    known = measured(a=0.01, b=0.01, c=0.001)
    on_b = PLACER.place(PlacementProblem(replace(SPEC, source="b"), manifest, [node("b")], known))
    away = [node("a", connected=False), node("b"), node("c")]
    assert nodes(afresh(on_b, away, known).found) == ["b", "c"]
    assert nodes(afresh(on_b, [node("a"), node("b"), node("c")], known).found)[0] == "a"
