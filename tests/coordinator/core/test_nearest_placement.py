"""The packed files of nodes: found by their ids, weighed by the planner, and never a reason to
move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.placement.fresh_plan import planned_again
from edgeshard_coordinator.core.placement.nearest_placement import nearest, with_held
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.events import (
    HeartbeatsReceived,
    NodeConnected,
    NodeRegistered,
)
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of
from edgeshard_coordinator.core.values.state import State

from edgeshard.architectures import parse_config
from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT, UnitForm, layer_unit
from edgeshard.domain.control.commands import Heartbeat
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.traffic import NO_TRAFFIC
from edgeshard.domain.ids import Digest, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.models.packed_units import NOTHING_HELD, PackedParts
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import LinkProfile

DIGEST = Digest("d" * 64)
MIB = 1 << 20
SLOW_S = 2e-2
"""Block time of a source that had better compute one layer only."""


def spec_of(**changes: Any) -> DeploymentSpec:
    return parse_spec(
        {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "dtype": "float32",
            "objective": "latency",
            **changes,
        }
    )


def node(
    name: str, held: PackedParts = NOTHING_HELD, free: int = 1024 * MIB, **changes: Any
) -> Candidate:
    facts = DeviceFacts("cpu", "some CPU", 2, 1024 * MIB, 1024 * MIB, False, "test")
    node = Candidate(
        NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", free, True, facts, packed_parts=held
    )
    return replace(node, **changes)


def layers(first: int, end: int) -> PackedParts:
    return PackedParts(frozenset(range(first, end)))


@pytest.fixture(scope="module")
def manifest(make_manifest: Callable[..., ModelManifest]) -> ModelManifest:
    return make_manifest()


@pytest.fixture(scope="module")
def measured(
    make_profile: Any, manifest: ModelManifest
) -> Callable[..., Mapping[NodeId, Measurements]]:
    """Blocks of the given seconds by node, and links between all."""

    def make(**block_s: float) -> Mapping[NodeId, Measurements]:
        known = {}
        for name, seconds in block_s.items():
            profile = make_profile(manifest.config, seconds, DType.FLOAT32)
            links = {
                NodeId(f"id-{other}"): Reported(LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20), 0.0)
                for other in block_s
                if other != name
            }
            known[NodeId(f"id-{name}")] = Measurements(
                {key_of(profile): Reported(profile, 0.0)}, links
            )
        return known

    return make


def cuts(placement: Placement) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in placement.stages)


def ids_of(form: UnitForm, *units: str) -> tuple[int, ...]:
    return tuple(sorted(int(form.id(unit), 16) for unit in units))


def test_what_is_held_counts_in_the_form_that_is_wanted(manifest: ModelManifest) -> None:
    shape = parse_config(manifest.config)
    plain = UnitForm(DIGEST, DType.FLOAT32, None, shape)
    small = UnitForm(DIGEST, DType.FLOAT32, Quantisation.INT8, shape)
    nodes = [
        node("a", packed=ids_of(plain, layer_unit(0), layer_unit(3), EMBEDDING_UNIT)),
        node("b", packed=ids_of(small, layer_unit(5), HEAD_UNIT)),
        node("c"),
    ]
    found = with_held(nodes, spec_of(), manifest, DIGEST)
    assert [node.packed_parts for node in found] == [
        PackedParts(frozenset({0, 3}), embedding=True),
        NOTHING_HELD,
        NOTHING_HELD,
    ]
    found = with_held(nodes, spec_of(quantisation={"*": "int8"}), manifest, DIGEST)
    assert [node.packed_parts for node in found] == [
        PackedParts(embedding=True),
        PackedParts(frozenset({5}), head=True),
        NOTHING_HELD,
    ]
    found = with_held(nodes, spec_of(dtype="bfloat16"), manifest, DIGEST)
    assert [node.packed_parts for node in found] == [NOTHING_HELD] * 3
    assert (
        with_held(nodes, spec_of(), manifest, Digest("e" * 64))[0].packed_parts == NOTHING_HELD
    ), "of another model"


def test_a_node_says_what_it_keeps_and_is_believed_until_it_says_otherwise(
    make_registration: Any,
) -> None:
    state = apply(State(instance="test"), NodeRegistered(make_registration("a"), now=0.0))
    state = apply(state, NodeConnected(NodeId("id-a"), "i1", 1, now=0.0))
    assert state.candidates()[0].packed == ()
    version = state.version
    for packed in ((3, 9), (9,)):
        beat = Heartbeat(NodeId("id-a"), "i1", (), 0, packed=packed)
        state = apply(state, HeartbeatsReceived((beat,), now=1.0))
        assert state.candidates()[0].packed == packed
    state = apply(state, NodeRegistered(make_registration("a"), now=2.0))
    assert state.candidates()[0].packed == (9,) and state.version == version, (
        "no placement is outdated by it"
    )


@pytest.mark.parametrize(("block_s", "chosen"), [(5e-3, "c"), (5.15e-3, "c"), (5.6e-3, "b")])
def test_a_placement_takes_the_node_that_holds_the_layers_within_the_margin(
    manifest: ModelManifest, measured: Any, block_s: float, chosen: str
) -> None:
    nodes = [node("a"), node("b"), node("c", layers(0, 12))]
    known = measured(a=SLOW_S, b=5e-3, c=block_s)
    plain = PlanningPlacer().place(
        PlacementProblem(spec_of(), manifest, [*nodes[:2], node("c")], known)
    )
    assert plain.stages[-1].node_name == "b" and not plain.note
    placement = PlanningPlacer().place(PlacementProblem(spec_of(), manifest, nodes, known))
    assert placement.stages[-1].node_name == chosen
    assert ("holds layers" in placement.note and "chosen over a=" in placement.note) == (
        chosen == "c"
    )


def test_a_lost_stage_goes_to_the_node_that_holds_its_layers(
    manifest: ModelManifest, measured: Any
) -> None:
    nodes = [node("a"), node("b"), node("c"), node("d", layers(4, 12))]
    known = measured(a=SLOW_S, b=5e-3, c=5e-3, d=5.1e-3)
    broken = PlanningPlacer().place(
        PlacementProblem(spec_of(layers="a=0:4,b=4:12"), manifest, nodes[:2], known)
    )
    lost = Lost(frozenset({NodeId("id-b")}))
    found = PlanningPlacer().repair(
        PlacementProblem(spec_of(), manifest, nodes, known, NO_TRAFFIC), broken, lost
    )
    assert cuts(found) == "a=0:4,d=4:12"
    slow = measured(a=SLOW_S, b=5e-3, c=5e-3, d=6e-3)
    found = PlanningPlacer().repair(
        PlacementProblem(spec_of(), manifest, nodes, slow, NO_TRAFFIC), broken, lost
    )
    assert cuts(found) == "a=0:4,c=4:12"


def test_of_placements_the_nearest_is_within_the_margin_of_the_best(
    manifest: ModelManifest, measured: Any
) -> None:
    known = measured(a=5e-3, b=5e-3, c=5e-3)
    nodes = [node("a"), node("b"), node("c", layers(6, 12))]
    found = [
        PlanningPlacer().place(PlacementProblem(spec_of(layers=text), manifest, nodes, known))
        for text in ("a=0:6,b=6:12", "a=0:6,c=6:12")
    ]
    for costs, chosen in (
        ((1.0, 1.05), 1),
        ((1.0, 1.06), 0),
        ((-1.05, -1.0), 1),
        ((-1.06, -1.0), 0),
        ((0.0, 0.0), 1),
    ):
        rank = dict(zip(map(cuts, found), costs, strict=True))
        best = nearest(found, lambda one, rank=rank: (False, rank[cuts(one)]), nodes)  # type: ignore[misc]
        assert best is found[chosen], costs
    amiss = {cuts(found[0]): (False, 1.0), cuts(found[1]): (True, 1.0)}
    assert nearest(found, lambda one: amiss[cuts(one)], nodes) is found[0], (
        "what is in memory comes first"
    )


def test_what_nodes_hold_decides_where_to_move_and_not_whether(
    manifest: ModelManifest, measured: Any
) -> None:
    """On b it is more than 5 % faster than on c, its present node; on d, which holds the layers, 3
    %."""
    known = measured(a=SLOW_S, b=5e-3, c=5.4e-3, d=5.2e-3)
    nodes = [node("a"), node("b"), node("c"), node("d", layers(1, 12))]
    placer = PlanningPlacer()
    current = placer.place(PlacementProblem(spec_of(layers="a=0:1,c=1:12"), manifest, nodes, known))
    near = placer.place(PlacementProblem(spec_of(), manifest, nodes, known))
    assert cuts(near) == "a=0:1,d=1:12"
    found = planned_again(
        placer, PlacementProblem(spec_of(), manifest, nodes, known, NO_TRAFFIC), current
    )
    assert found.reason is ReplanReason.WOULD_MOVE and found.found.stages[-1].node_name == "b"
    outlook = placer.outlook(
        PlacementProblem(spec_of(), manifest, nodes, known, NO_TRAFFIC), current
    )
    assert outlook.layers and outlook.layers[-1].node == "b"
