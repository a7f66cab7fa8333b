"""The models that may be drafts for others. A draft's memory is counted on the node of the first
layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer, sizes_of
from edgeshard_coordinator.core.placement.drafts import (
    check_draft,
    check_same_tokens,
    may_draft,
    placed_draft,
)
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.values.candidate import Candidate, held_bytes
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of

from edgeshard.architectures import parse_config
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.placement import PlacedDraft
from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange, ModelManifest
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import LinkProfile
from tests.agent.model.families import VARIANTS
from tests.coordinator.conftest import build_manifest

MIB = 1 << 20
FACTS = DeviceFacts("cpu", "test node", 2, 4096 * MIB, 4096 * MIB, False, "test")
Make = Callable[..., ModelManifest]


def node(name: str, free: int = 4096 * MIB) -> Candidate:
    return Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", free, True, FACTS)


def spec_of(**changes: Any) -> Any:
    values = {
        "name": "tale",
        "model": "tiny",
        "source": "a",
        "dtype": "float32",
        "concurrency": 2,
        "draft": "small",
    }
    return parse_spec({**values, **changes})


def of_family(name: str) -> ModelManifest:
    """A model of another family, with few parameters."""
    config = json.loads(VARIANTS[name].library_config().to_json_string(use_diff=False))
    return replace(
        build_manifest(1, "other"),
        architecture=config["model_type"],
        config_json=json.dumps(config),
    )


@pytest.fixture
def small(make_manifest: Make) -> ModelManifest:
    return make_manifest(2, "small")


@pytest.fixture
def draft(make_manifest: Make, small: ModelManifest) -> PlacedDraft:
    return placed_draft(spec_of(), make_manifest(), small, small.digest())


def test_a_draft_has_memory_for_the_requests_it_guesses_for(
    make_manifest: Make, small: ModelManifest
) -> None:
    model, shape = make_manifest(), parse_config(small.config)
    for concurrency, requests in ((1, 1), (2, 2), (9, 4)):
        placed = placed_draft(spec_of(concurrency=concurrency), model, small, small.digest())
        assert (placed.model, placed.manifest_digest, placed.layer_count) == (
            "small",
            small.digest(),
            2,
        )
        assert (placed.requests, placed.kv_blocks) == (requests, 8 * requests)
        assert placed.kv_bytes == requests * 128 * shape.kv_bytes_per_token(
            LayerRange(0, 2), spec_of().effective_kv_dtype
        )
        assert placed.parameter_bytes == 4 * small.parameter_count and placed.workspace_bytes > 0
    assert (
        placed_draft(
            spec_of(concurrency=1, kv_overcommit=True), model, small, small.digest()
        ).requests
        == 2
    )
    assert (
        placed_draft(spec_of(concurrency=1, max_context=32), model, small, small.digest()).kv_blocks
        == 2
    )
    short = make_manifest(2, "small", max_context=16)
    assert placed_draft(spec_of(concurrency=1), model, short, short.digest()).kv_blocks == 1


def test_it_is_whole_however_the_model_keeps_its_weights(
    make_manifest: Make, small: ModelManifest
) -> None:
    quantised = spec_of(quantisation={"*": "int4"}, kv_dtype="bfloat16")
    placed = placed_draft(quantised, make_manifest(), small, small.digest())
    assert placed == placed_draft(spec_of(), make_manifest(), small, small.digest())


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (lambda make: make(12, "same"), "DRAFT_NOT_SMALLER"),
        (lambda make: of_family("qwen3_5-text"), "DRAFT_KIND"),
        (lambda make: of_family("opt-plain"), "DRAFT_KIND"),
    ],
)
def test_other_models_are_refused(
    make_manifest: Make, draft: Callable[[Make], ModelManifest], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_draft(make_manifest(12), draft(make_manifest))
    assert (caught.value.field, caught.value.reason) == ("draft", reason)


def test_none_is_of_use_where_nothing_is_guessed(make_manifest: Make, small: ModelManifest) -> None:
    hybrid = replace(of_family("qwen3_5-text"), tensors=make_manifest(40).tensors)
    with pytest.raises(InvalidArgumentError) as caught:
        check_draft(hybrid, small)
    assert caught.value.reason == "DRAFT_UNUSED"
    with pytest.raises(InvalidArgumentError, match="speculation off"):
        spec_of(speculation="off")


def test_tokens_must_be_the_same() -> None:
    check_same_tokens("m", "x", "d", "x")
    with pytest.raises(InvalidArgumentError, match="tokenizer of d") as caught:
        check_same_tokens("m", "x", "d", "y")
    assert (caught.value.field, caught.value.reason) == ("draft", "DRAFT_TOKENIZER")


def test_the_largest_of_those_that_are_much_smaller_is_tried_first(make_manifest: Make) -> None:
    model = make_manifest(60, "large")
    others = [make_manifest(layers, f"of-{layers}") for layers in (1, 3, 2, 30)] + [
        of_family("opt-plain")
    ]
    found = may_draft(model, [(other, other.digest()) for other in others])
    assert [other.name for other, _ in found] == ["of-3", "of-2", "of-1"]


def test_its_memory_is_counted_with_the_first_layer(
    make_manifest: Make, draft: PlacedDraft
) -> None:
    manifest, nodes = make_manifest(), [node("a"), node("b")]
    spec = spec_of(layers="a=0:6,b=6:12")
    plain, placed = (SimplePlacer().place(spec, manifest, nodes, one) for one in (None, draft))
    assert plain.draft is None and placed.draft == draft
    more = [
        held_bytes(with_it) - held_bytes(without)
        for without, with_it in zip(plain.stages, placed.stages, strict=True)
    ]
    assert more == [draft.held_bytes, 0]
    need = sizes_of(spec, manifest, placed).needed_bytes(LayerRange(0, 6), NodeName("a"))
    SimplePlacer().place(spec, manifest, [node("a", need), node("b")], draft)
    with pytest.raises(ResourceExhaustedError, match="node a is short of memory"):
        SimplePlacer().place(spec, manifest, [node("a", need - 1), node("b")], draft)
    SimplePlacer().place(spec, manifest, [node("a", need - 1), node("b")])


def test_it_goes_where_the_first_layer_goes(make_manifest: Make, draft: PlacedDraft) -> None:
    """A repair keeps it, whether the nodes keep their layers or not."""
    manifest, nodes = make_manifest(), [node("a"), node("b"), node("c")]
    spec, placer = spec_of(layers="a=0:6,b=6:12"), PlanningPlacer()
    placed = placer.place(PlacementProblem(spec, manifest, nodes, {}, draft=draft))
    assert placed.draft == draft
    problem = PlacementProblem(spec_of(), manifest, nodes, {}, draft=placed.draft)
    for lost in "ab":
        found = placer.repair(problem, placed, Lost(frozenset({NodeId(f"id-{lost}")})))
        assert found.draft == draft and lost not in [stage.node_name for stage in found.stages]
        first, *others = found.stages
        assert first.workspace_bytes > draft.held_bytes
        assert all(stage.workspace_bytes < placed.stages[0].workspace_bytes for stage in others)


def test_the_planner_leaves_room_for_it(
    make_manifest: Make, make_profile: Any, draft: PlacedDraft
) -> None:
    """A model that just fits its source without a draft continues on another node with one, by plan
    and not by memory.
    """
    manifest, known = make_manifest(), {}
    for name, other in ("ab", "ba"):
        profile = make_profile(manifest.config, 0.01, DType.FLOAT32, quantisation=None)
        links = {NodeId(f"id-{other}"): Reported(LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20), 0.0)}
        known[NodeId(f"id-{name}")] = Measurements({key_of(profile): Reported(profile, 0.0)}, links)

    def nodes_of(free: int, draft: PlacedDraft | None) -> list[str]:
        problem = PlacementProblem(
            spec_of(objective="request"), manifest, [node("a", free), node("b")], known, draft=draft
        )
        try:
            placement = PlanningPlacer().place(problem)
        except ResourceExhaustedError:
            return []
        assert placement.predicted is not None
        return [str(stage.node_name) for stage in placement.stages]

    least, enough = 0, 1024 * MIB  # the need of only the model on its source is between the two
    while enough - least > MIB // 16:
        middle = (least + enough) // 2
        least, enough = (least, middle) if nodes_of(middle, None) == ["a"] else (middle, enough)
    small = replace(draft, parameter_bytes=MIB // 4, kv_bytes=0, workspace_bytes=0)
    assert nodes_of(enough, None) == ["a"] and nodes_of(enough, small) == ["a", "b"]
    assert nodes_of(enough + MIB // 4, small) == ["a"]
