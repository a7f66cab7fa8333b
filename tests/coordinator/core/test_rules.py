"""No placement breaks a rule: by memory, by hand, repaired, standby."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments import standby
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer, sizes_of
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem, of_nodes_there
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.placement.ruled import allowed_sets, conditions_of
from edgeshard_coordinator.core.placement.source_choice import place_from_any
from edgeshard_coordinator.core.values.candidate import Candidate
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.rules import broken
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PlacementError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.nodes.device import DeviceFacts

MIB = 1 << 20
FACTS = DeviceFacts("cpu", "x", 1, 1 << 34, 1 << 33, False, "", "bits-1")
LABELS = {
    "a": {"zone": "hall1", "rack": "r1", "watts": "60"},
    "b": {"zone": "hall1", "rack": "r2", "watts": "60"},
    "c": {"zone": "hall2", "rack": "r1", "watts": "40"},
    "d": {"zone": "hall2", "watts": "30", "gpu": "no"},
    "e": {},
}


def node(name: str, free: int = 1 << 30, connected: bool = True) -> Candidate:
    made = Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", free, connected, FACTS)
    return replace(made, labels=LABELS[name])


ALL = tuple(map(node, LABELS))


def spec_of(*rules: str, **changes: Any) -> DeploymentSpec:
    values = {"name": "tale", "model": "tiny", "source": "a", "dtype": "float32", "concurrency": 2}
    return parse_spec({**values, "max_context": 64, "rule": rules, **changes})


@pytest.fixture(scope="module")
def manifest(make_manifest: Any) -> ModelManifest:
    made: ModelManifest = make_manifest()
    return made


@pytest.fixture(scope="module")
def place(manifest: ModelManifest) -> Any:
    def run(spec: DeploymentSpec, nodes: Sequence[Candidate] = ALL) -> Placement:
        return PlanningPlacer().place(PlacementProblem(spec, manifest, nodes, {}))

    return run


def used(placement: Placement) -> str:
    return "".join(sorted(stage.node_name for stage in placement.stages))


@pytest.mark.parametrize(
    ("rules", "nodes"),
    [
        ((), "a"),
        (("apart a,b", "avoid e"), "a"),
        (("together by zone", "use b"), "ab"),
        (("apart by rack", "use b"), "ab"),
        (("at-most 2 of a,b,c,d,e", "use e"), "ae"),
        (("max-watts 105", "use c"), "ac"),
        (("together a,e", "at-most 3 of a,b,c,d,e", "use d"), "ade"),
        (("use zone=hall2", "at-most 1 of zone=hall2", "avoid b,e"), "ac"),
    ],
)
def test_by_memory_the_smallest_set_that_rules_allow_is_used(
    place: Any, rules: tuple[str, ...], nodes: str
) -> None:
    assert used(place(spec_of(*rules))) == nodes


def test_a_node_that_must_hold_a_stage_holds_one_with_little_memory(place: Any) -> None:
    small = [replace(one, free_bytes=68 * MIB) if one.name == "d" else one for one in ALL]
    assert "d" not in used(place(spec_of(), small))
    assert "d" in used(place(spec_of("use d"), small))


def test_rules_that_no_set_meets_are_named_and_no_others(place: Any) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        place(spec_of("avoid e", "use b", "at-most 4 of a,b,c,d", "apart a,b"))
    assert (refused.value.field, refused.value.reason) == ("rule", "RULES_CONFLICT")
    assert "'use b' and 'apart a,b' together" in refused.value.message
    assert "avoid" not in refused.value.message and "at-most" not in refused.value.message


def test_a_rule_that_leaves_too_little_memory_is_named_and_without_it_the_memory_is(
    place: Any,
) -> None:
    small = [replace(one, free_bytes=67 * MIB) for one in ALL]
    with pytest.raises(FailedPreconditionError) as refused:
        place(spec_of("avoid e", "at-most 1 of a,b,c,d,e"), small)
    assert (
        "'at-most 1 of a,b,c,d,e'" in refused.value.message and "avoid" not in refused.value.message
    )
    with pytest.raises(ResourceExhaustedError):
        place(spec_of("avoid e"), [replace(one, free_bytes=1 << 10) for one in ALL])


def test_layers_by_hand_that_break_a_rule_are_refused_by_its_name(place: Any) -> None:
    assert used(place(spec_of("apart a,c", layers="a=0:4,b=4:12"))) == "ab"
    with pytest.raises(PlacementError) as refused:
        place(spec_of("apart a,b", "avoid gpu=no", layers="a=0:4,b=4:12"))
    assert refused.value.reason == "RULE_BROKEN" and refused.value.field == "rule"
    assert "'apart a,b'" in refused.value.message and "gpu" not in refused.value.message


def test_a_rule_about_nothing_there_is_is_refused(place: Any) -> None:
    for rule in ("avoid f", "use floor=3"):
        with pytest.raises(InvalidArgumentError) as refused:
            place(spec_of(rule))
        assert refused.value.field.startswith("rule[0]")


def test_streaming_and_energy_do_not_go_with_rules_yet(place: Any) -> None:
    for changes in ({"allow_streaming": True}, {"objective": "energy"}):
        with pytest.raises(InvalidArgumentError) as refused:
            place(spec_of("avoid e", **changes))
        assert refused.value.reason == "RULES_NOT_SUPPORTED" and refused.value.field == "rule"


def test_a_source_is_chosen_that_rules_allow(manifest: ModelManifest) -> None:
    big = [replace(one, free_bytes=2 << 30) if one.name in "ab" else one for one in ALL]
    spec = spec_of("together by zone", "use d", source="")

    def by_memory(sourced: DeploymentSpec, nodes: Sequence[Candidate]) -> Placement:
        return SimplePlacer().place(sourced, manifest, nodes)

    assert used(place_from_any(spec, big, by_memory)) == "cd"


@pytest.fixture(scope="module")
def repair(manifest: ModelManifest) -> Any:
    def run(
        spec: DeploymentSpec, before: Placement, nodes: Sequence[Candidate], *lost: str
    ) -> Placement:
        gone = [replace(one, connected=one.connected and one.name not in lost) for one in nodes]
        return PlanningPlacer().repair(PlacementProblem(spec, manifest, gone, {}), before, Lost())

    return run


def test_a_lost_node_is_replaced_by_one_that_rules_allow(place: Any, repair: Any) -> None:
    spec = spec_of("apart b,d", "avoid e", layers="a=0:4,b=4:9,c=9:12")
    before = place(spec)
    assert used(repair(spec, before, ALL, "b")) in ("acd", "ac")
    assert used(repair(spec, before, ALL, "c")) == "ab", "the spare ones are not allowed beside b"


def test_where_only_a_rule_could_be_broken_repair_names_it(place: Any, repair: Any) -> None:
    spec = spec_of("use b", "avoid e", layers="a=0:4,b=4:12")
    with pytest.raises(FailedPreconditionError) as refused:
        repair(spec, place(spec), ALL, "b")
    assert refused.value.reason == "RULES_CONFLICT" and "'use b'" in refused.value.message
    assert "avoid" not in refused.value.message


def test_what_a_spec_says_of_a_node_that_was_removed_is_left_out(place: Any, repair: Any) -> None:
    about_e: dict[str, Any] = {"exclude": ["e"], "reserve": {"e": 1}, "standby": ["e", "d"]}
    before = place(spec_of(layers="a=0:4,b=4:12"))
    there = ALL[:4]
    for changes in ({"exclude": ["e"]}, {"reserve": {"e": 1}}, {"standby": ["e", "d"]}):
        with pytest.raises(NotFoundError):
            repair(spec_of(**changes), before, there, "b")
    spec = spec_of(
        "avoid c,e", "use e", "apart a,b,e", "together c,e", "at-most 2 of a,b,c,d,e", **about_e
    )
    left = of_nodes_there(spec, there)
    assert list(map(str, left.rule)) == ["avoid c", "apart a,b", "at-most 2 of a,b,c,d"]
    assert (left.exclude, left.reserve, left.standby) == ((), {}, ("d",))
    assert used(repair(left, before, there, "b")) in ("a", "ad")
    assert of_nodes_there(spec, ALL) == spec


@given(st.sets(st.sampled_from("bcde")))
def test_without_its_removed_nodes_a_spec_is_still_a_spec(gone: set[str]) -> None:
    spec = spec_of(
        *MENU[:5],
        "avoid d",
        "at-most 2 of a,b,c,d,e",
        exclude=["e"],
        reserve={"c": 1},
        standby=["auto"],
    )
    left = of_nodes_there(spec, [node for node in ALL if node.name not in gone])
    left.check()
    for rule in left.rule:
        rule.check()
    assert not gone & {
        *left.exclude,
        *left.reserve,
        *(name for rule in left.rule for name in rule.nodes),
    }


def test_no_node_stands_by_where_rules_would_not_let_it_take_over(
    place: Any, manifest: ModelManifest
) -> None:
    def standbys(*rules: str) -> dict[str, str]:
        spec = spec_of(*rules, layers="a=0:4,b=4:12", standby=["d"])
        before = place(spec)
        chosen = standby.choose(spec, before, ALL, sizes_of(spec, manifest, before))
        return {choice.node_name: str(choice.layers) for choice in chosen}

    assert standbys() == {"d": "0:12"}
    assert standbys("apart b,d") == {"d": "4:12"}, "beside a it may be"
    assert standbys("together by zone") == {} and standbys("avoid gpu=no") == {}


MENU = (
    *(
        "together a,b",
        "together c,d",
        "together by zone",
        "apart a,c",
        "apart a,b,c",
        "apart by rack",
        "use b",
    ),
    *(
        "use zone=hall2",
        "avoid d",
        "avoid gpu=no",
        "at-most 1 of zone=hall1",
        "at-most 2 of a,b,c,d,e",
    ),
    *("max-watts 100", "max-watts 130"),
)


@settings(max_examples=150, deadline=None)
@example(rules=["apart by rack"], free=[280] * 5, lost={"a"}, source="", standbys=["auto"])
@given(
    rules=st.lists(st.sampled_from(MENU), max_size=4, unique=True),
    free=st.lists(st.integers(260, 280), min_size=5, max_size=5),
    lost=st.sets(st.sampled_from("abcde"), max_size=3),
    source=st.sampled_from(["", "a", "d"]),
    standbys=st.sampled_from([[], ["auto"], ["d", "e"]]),
)
def test_whatever_is_placed_repaired_or_standing_by_keeps_the_rules(
    rules: list[str],
    free: list[int],
    lost: set[str],
    source: str,
    standbys: list[str],
    manifest: ModelManifest,
    repair: Any,
) -> None:
    nodes = [replace(one, free_bytes=size * MIB // 4) for one, size in zip(ALL, free, strict=True)]
    spec = spec_of(*rules, source=source, standby=standbys)
    conditions = conditions_of(spec, nodes)

    def by_memory(sourced: DeploymentSpec, there: Sequence[Candidate]) -> Placement:
        return PlanningPlacer().place(PlacementProblem(sourced, manifest, there, {}))

    with suppress(EdgeShardError):
        before = by_memory(spec, nodes) if source else place_from_any(spec, nodes, by_memory)
        assert not broken(conditions, used(before))
        sourced = replace(spec, source=str(before.head.node_name))
        for choice in standby.choose(sourced, before, nodes, sizes_of(sourced, manifest, before)):
            covered = [
                stage for stage in before.stages if choice.layers.first <= stage.layers.first
            ]
            others = {stage.node_name for stage in before.stages} - {covered[0].node_name}
            assert not broken(conditions, {*others, choice.node_name})
        after = repair(sourced, before, nodes, *lost)
        assert not broken(conditions, used(after)) and not lost & set(used(after))


@settings(max_examples=100)
@given(st.lists(st.sampled_from(MENU), max_size=4, unique=True), st.sampled_from("abcde"))
def test_the_search_finds_just_the_sets_that_meet_the_conditions(
    rules: list[str], must: str
) -> None:
    conditions = conditions_of(spec_of(*rules), ALL)
    every = [
        {name for bit, name in enumerate("abcde") if number >> bit & 1} for number in range(32)
    ]
    wanted = {
        frozenset(names) for names in every if must in names and not broken(conditions, names)
    }
    found = list(allowed_sets(conditions, "abcde", must))
    assert set(found) == wanted and len(found) == len(wanted)
