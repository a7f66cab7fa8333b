"""A deployment without a source gets the best one, by figures or else by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.source_choice import place_from_any, with_source
from edgeshard_coordinator.core.values.candidate import Candidate

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Prediction
from edgeshard.domain.errors import ResourceExhaustedError, UnavailableError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.packed_units import PackedParts
from edgeshard.domain.nodes.device import DeviceFacts

SPEC = parse_spec({"name": "tale", "model": "tiny"})
FACTS = DeviceFacts("cpu", "", 2, 1 << 30, 1 << 30, False, "test")


def node(name: str, free: int = 1 << 30, connected: bool = True) -> Candidate:
    return Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:1", free, connected, FACTS)


class Planner:
    """Places everything on the source; `seconds` of a request by node, None without figures, absent
    if it does not fit.
    """

    def __init__(self, **seconds: float | None) -> None:
        self.seconds = seconds
        self.asked: list[str] = []

    def place(self, spec: DeploymentSpec, candidates: Sequence[Candidate] = ()) -> Placement:
        self.asked.append(spec.source)
        if spec.source not in self.seconds:
            raise ResourceExhaustedError(f"{spec.source} is full")
        taken_s, node = self.seconds[spec.source], NodeName(spec.source)
        figures = (
            None
            if taken_s is None
            else Prediction(taken_s, taken_s, 1 / taken_s, "", request_s=taken_s)
        )
        stage = PlacedStage(0, NodeId(f"id-{node}"), node, f"{node}:1", LayerRange(0, 12), 1, 1)
        return Placement((stage,), 16, 1, 1, 1, predicted=figures)


def chosen(planner: Planner, *nodes: Candidate, **spec: Any) -> str:
    return str(place_from_any(replace(SPEC, **spec), nodes, planner.place).stages[0].node_name)


def test_the_best_figures_win() -> None:
    assert chosen(Planner(a=3.0, b=1.0, c=2.0), node("a"), node("b"), node("c")) == "b"
    note = place_from_any(SPEC, [node("a"), node("b")], Planner(a=3.0, b=1.0).place).note
    assert note == "Source: b, the best of the 2 nodes that could be it."


def test_figures_come_before_memory_and_memory_before_names() -> None:
    assert chosen(Planner(a=None, b=9.0), node("a", 2 << 30), node("b")) == "b"
    assert chosen(Planner(a=None, b=None), node("a"), node("b", 2 << 30)) == "b"
    assert chosen(Planner(a=None, b=None), node("b"), node("a")) == "a"


def test_nodes_that_cannot_be_are_not_asked() -> None:
    planner = Planner(a=1.0, b=2.0, c=3.0)
    away, starting = node("b", connected=False), replace(node("d"), starting=True)
    assert chosen(planner, node("a"), away, starting, node("c"), exclude=("a",)) == "c"
    assert planner.asked == ["c"]


def test_without_any_placement_the_first_nodes_reason_is_told() -> None:
    with pytest.raises(ResourceExhaustedError, match="b is full"):
        chosen(Planner(), node("a"), node("b", 2 << 30))
    with pytest.raises(UnavailableError, match="no connected node") as caught:
        chosen(Planner(), node("a", connected=False))
    assert (caught.value.field, caught.value.reason) == ("source", "NO_NODE")


def test_no_more_plans_than_are_bearable() -> None:
    planner = Planner(**{f"n{number}": 1.0 for number in range(40)})
    chosen(planner, *(node(f"n{number}") for number in range(40)))
    assert len(planner.asked) == 8


def test_what_is_recorded_names_the_source() -> None:
    placement = place_from_any(SPEC, [node("a")], Planner(a=1.0).place)
    assert with_source(SPEC, placement).source == "a"
    assert with_source(replace(SPEC, source="z"), placement).source == "z"


@pytest.mark.parametrize(
    ("seconds", "source"),
    [
        ((1.0, 1.0), "b"),
        ((1.0, 1.04), "b"),
        ((1.0, 1.06), "a"),
        ((1.04, 1.0), "b"),
        ((1.0, None), "a"),
    ],
)
def test_the_node_that_holds_the_model_is_the_source_where_that_is_nearly_as_good(
    seconds: tuple[float, float | None], source: str
) -> None:
    holder = replace(
        node("b"), packed_parts=PackedParts(frozenset(range(12)), embedding=True, head=True)
    )
    planner = Planner(a=seconds[0], b=seconds[1])
    assert chosen(planner, node("a"), holder) == source
    note = place_from_any(SPEC, [node("a"), holder], planner.place).note
    assert ("has less to fetch and pack than that of a" in note) == (
        source == "b" and seconds != (1.04, 1.0)
    )
