"""The placement with which a deployment continues when nodes are lost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.placement.repair import (
    MOST_WAYS,
    Lost,
    Survivors,
    survivors,
    ways,
    without_most,
)
from edgeshard_coordinator.core.values.candidate import Candidate
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import ExplicitStage, Placement, check_cover
from edgeshard.domain.deployments.traffic import NO_TRAFFIC
from edgeshard.domain.errors import ResourceExhaustedError, UnavailableError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts

FACTS = DeviceFacts("cpu", "x", 1, 1 << 34, 1 << 33, False, "", "bits-1")
SPEC = parse_spec(
    {
        "name": "tale",
        "model": "tiny",
        "source": "a",
        "layers": "a=0:4,b=4:9,c=9:12",
        "concurrency": 2,
    }
)


def node(name: str, **changes: Any) -> Candidate:
    known = Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", 1 << 33, True, FACTS)
    return replace(known, **changes)


def lost(*names: str) -> Lost:
    return Lost(frozenset(NodeId(f"id-{name}") for name in names))


def layers(placement: Placement) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in placement.stages)


@settings(max_examples=300)
@given(st.data())
def test_every_way_is_whole_and_takes_nothing_from_a_survivor(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    kept = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    spares = tuple(NodeName(f"s{i}") for i in range(data.draw(st.integers(0, 3))))
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    pairs = itertools.pairwise(bounds)
    stages = tuple(
        ExplicitStage(NodeName(f"n{i}"), LayerRange(*pair)) for i, pair in enumerate(pairs)
    )
    found = list(ways(Survivors(stages, tuple(kept), spares)))
    assert len(found) <= MOST_WAYS
    for way in found:
        check_cover(way, bounds[-1], way[0].node)
        for stage, stays in zip(stages, kept, strict=True):
            mine = [other.layers for other in way if other.node == stage.node]
            if stays:
                assert (
                    len(mine) == 1
                    and mine[0].first <= stage.layers.first
                    and mine[0].end >= stage.layers.end
                )
            else:
                assert not mine
    holes = len(sizes) - sum(kept)
    assert bool(found) == (any(kept) or holes <= len(spares))


def test_nodes_that_cannot_take_part_are_no_spares() -> None:
    broken = Placement((), 16, 8, 1, 1)
    nodes = [
        node("a"),
        node("away", connected=False),
        node("starting", starting=True),
        node("excluded"),
        node("lost"),
    ]
    assert survivors(broken, nodes, lost("lost"), ("excluded",)).spares == ("a",)


@pytest.fixture
def repaired(make_manifest: Any) -> Any:
    manifest = make_manifest()

    def repair(nodes: list[Candidate], lost: Lost, spec: Any = SPEC) -> Placement:
        placer = PlanningPlacer()
        before = placer.place(PlacementProblem(spec, manifest, [node(name) for name in "abc"], {}))
        return placer.repair(PlacementProblem(spec, manifest, nodes, {}, NO_TRAFFIC), before, lost)

    return repair


def test_a_spare_node_takes_what_was_lost_and_the_others_keep_layers_and_pool(
    repaired: Any,
) -> None:
    nodes = [node("a"), node("b", connected=False), node("c"), node("d")]
    found = repaired(nodes, lost())
    assert layers(found) == "a=0:4,d=4:9,c=9:12" and "same bits" in found.note
    assert found.kv_blocks == repaired([node(name) for name in "abc"], lost()).kv_blocks


def test_a_lost_source_is_replaced_too(repaired: Any) -> None:
    assert (
        layers(repaired([node("a", connected=False), node("b"), node("c"), node("d")], lost()))
        == "d=0:4,b=4:9,c=9:12"
    )


def test_without_a_spare_a_neighbour_takes_it_beside_its_own(repaired: Any) -> None:
    found = layers(repaired([node("a"), node("b", connected=False), node("c")], lost()))
    assert found in ("a=0:9,c=9:12", "a=0:4,c=4:12")


def test_where_no_survivor_can_keep_its_layers_others_are_planned(repaired: Any) -> None:
    """No node of the placement is left."""
    found = repaired([*(node(name, connected=False) for name in "abc"), node("d")], lost())
    assert layers(found) == "d=0:12"


def test_a_node_that_failed_and_a_link_that_stands_still_are_gone_round(repaired: Any) -> None:
    nodes = [node(name) for name in "abcd"]
    assert "b=" not in layers(repaired(nodes, lost("b")))
    stalled = Lost(links=frozenset({(NodeId("id-a"), NodeId("id-b"))}))
    found = repaired(nodes, stalled)
    assert not stalled.crosses(found)


def test_other_bits_are_said(repaired: Any) -> None:
    other = replace(FACTS, bits_fingerprint="bits-2")
    found = repaired(
        [node("a"), node("b", connected=False), node("c"), node("d", facts=other)], lost()
    )
    assert "other bits" in found.note


def test_without_memory_anywhere_it_says_what_is_short(repaired: Any) -> None:
    nodes = [
        node("a", free_bytes=1 << 10),
        node("b", connected=False),
        node("c", free_bytes=1 << 10),
    ]
    with pytest.raises(ResourceExhaustedError):
        repaired(nodes, lost())


def test_of_bad_links_the_newest_are_gone_round_where_not_all_can_be() -> None:
    pairs = [(NodeId(name), NodeId("z")) for name in "abc"]
    bad = dict(zip(pairs, (3.0, 1.0, 2.0), strict=True))
    asked: list[set[Any]] = []

    def without(links: Any) -> Any:
        asked.append(set(links))
        if len(links) > 1:
            raise UnavailableError("no way", reason="NO_LINK")
        return tuple(links)

    found: Any = without_most(without, bad)
    assert found == (pairs[0],)
    assert asked == [set(pairs), set(), {pairs[2], pairs[0]}, {pairs[0]}]


def test_without_a_way_even_over_bad_links_it_is_not_looked_for_again_and_again() -> None:
    asked: list[Any] = []

    def without(links: Any) -> Any:
        asked.append(links)
        raise UnavailableError(f"no node is left, {len(links)}", reason="NO_NODE")

    with pytest.raises(UnavailableError, match="left, 2"):
        without_most(without, {(NodeId("a"), NodeId("b")): 1.0, (NodeId("b"), NodeId("a")): 2.0})
    assert len(asked) == 2
