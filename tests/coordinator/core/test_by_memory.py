"""Placements: by hand, in proportion to memory, and the ones that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer, StageSizes, sizes_of
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.candidate import held_bytes as placed_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.architectures import held_bytes, parse_config, stage_tensors
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.deployments.guesses import MOST_GUESSES
from edgeshard.domain.deployments.placement import Placement, Speculation
from edgeshard.domain.errors import (
    InvalidArgumentError,
    NotFoundError,
    PlacementError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import DiskProfile
from edgeshard.planning.costs.costs import Load
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.report.speculation import speculation_of
from tests.agent.model.families import VARIANTS
from tests.support.sizes import parameter_bytes

MIB = 1 << 20
FACTS = DeviceFacts("cpu", "test node", 2, 1024 * MIB, 1024 * MIB, False, "test")


def node(name: str, free: int = 1024 * MIB, connected: bool = True) -> Candidate:
    return Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", free, connected, FACTS)


@pytest.fixture(scope="module")
def place(make_manifest: Callable[..., Any]) -> Callable[..., Placement]:
    manifest = make_manifest()

    def run(*nodes: Candidate, **changes: Any) -> Placement:
        values = {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "dtype": "float32",
            "concurrency": 2,
            **changes,
        }
        return SimplePlacer().place(parse_spec(values), manifest, nodes)

    return run


def test_stages_have_the_rates_of_disks_that_kv_may_go_to(place: Any) -> None:
    nodes = (replace(node("a"), disk=DiskProfile(2e9, 1 << 40, 9e8)), node("b"))
    halves = "a=0:6,b=6:12"
    for changes, first in (
        ({"kv_swap_bytes": 1 << 20, "kv_swap_on_disk": True}, (2e9, 9e8)),
        ({"kv_swap_bytes": 1 << 20}, (0.0, 0.0)),
        ({}, (0.0, 0.0)),
    ):
        stages = place(*nodes, layers=halves, **changes).stages
        found = [(stage.disk_read_bytes_per_s, stage.disk_write_bytes_per_s) for stage in stages]
        assert found == [first, (0.0, 0.0)]


def test_micro_batches_are_one_for_each_stage_or_what_the_spec_says(place: Any) -> None:
    halves = "a=0:6,b=6:12"
    assert place(*ABC, layers=halves, concurrency=8).micro_batches == 2
    assert place(*ABC, layers=halves, concurrency=8, micro_batches=4).micro_batches == 4
    assert place(*ABC, layers=halves, concurrency=8, mode="sequential").micro_batches == 1


@pytest.mark.parametrize(
    "changes", [{"micro_batches": 3}, {"micro_batches": 2, "mode": "sequential"}], ids=str
)
def test_more_micro_batches_than_could_be_in_flight_are_refused(place: Any, changes: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        place(*ABC, **changes)
    assert refused.value.field == "micro_batches"


def cuts(placement: Placement) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in placement.stages)


ABC = (node("a"), node("b"), node("c"))


def test_by_hand(place: Any, make_manifest: Any) -> None:
    placement = place(
        *ABC, layers="a=0:4,b=4:9,c=9:12", dtype="bfloat16", kv_dtype="float32", max_context=100
    )
    assert cuts(placement) == "a=0:4,b=4:9,c=9:12"
    assert (placement.kv_block_tokens, placement.kv_blocks) == (16, 7 * 2)
    manifest = make_manifest()
    shape = parse_config(manifest.config)
    for index, stage in enumerate(placement.stages):
        assert stage.index == index and stage.node_id == f"id-{stage.node_name}"
        assert stage.parameter_bytes == parameter_bytes(
            stage_tensors(manifest, stage.layers), DType.BFLOAT16
        )
        assert stage.kv_bytes == 14 * 16 * shape.kv_bytes_per_token(stage.layers, DType.FLOAT32)


def test_quantised_nodes_hold_less(place: Any, make_manifest: Any) -> None:
    manifest = make_manifest()
    placement = place(
        *ABC, layers="a=0:4,b=4:9,c=9:12", dtype="bfloat16", quantisation={"*": "int8", "b": "int4"}
    )
    for stage, kept in zip(
        placement.stages, (Quantisation.INT8, Quantisation.INT4, Quantisation.INT8), strict=True
    ):
        tensors = stage_tensors(manifest, stage.layers)
        assert stage.parameter_bytes == held_bytes(
            manifest.config, tensors, stage.layers, DType.BFLOAT16, kept
        )
        assert stage.parameter_bytes < parameter_bytes(tensors, DType.BFLOAT16)


def test_states_are_saved_in_what_all_nodes_have_left(make_manifest: Any) -> None:
    """The placement is the same with them and without."""
    sizes = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "head_dim": 16,
    }
    manifest = make_manifest(
        model_type="qwen3_5_text", linear_num_value_heads=2, max_context=2048, **sizes
    )
    shape = parse_config(manifest.config)

    def placed(left: int = 512 * MIB, **changes: Any) -> Placement:
        """With `left` bytes free on b, besides the needs of the stage that is loaded there."""
        values = {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "layers": "a=0:4,b=4:12",
            "prefix_cache": True,
        }
        spec = parse_spec({**values, "dtype": "float32", "concurrency": 3, **changes})
        free = (
            StageSizes(spec, manifest, shape, Load(1, 2)).needed_bytes(
                LayerRange(4, 12), NodeName("b")
            )
            + left
        )
        return SimplePlacer().place(spec, manifest, (node("a"), node("b", free)))

    each = shape.state_bytes(LayerRange(4, 12), DType.FLOAT32)
    plain, most = placed(prefix_cache=False), placed()
    assert (plain.saved_states, most.saved_states) == (0, 3 + 3 * 2048 // 512), (
        "a request has few bytes of states"
    )
    assert [placed(left).saved_states for left in (0, each - 1, each, 5 * each + 1)] == [0, 0, 1, 5]
    before, after = plain.stages[1], placed(5 * each).stages[1]
    assert after == replace(before, workspace_bytes=before.workspace_bytes + 5 * each)
    assert placed(64 * each, reserve={"b": 60 * each}).saved_states == 4
    kept = sizes_of(
        parse_spec({"name": "tale", "model": "tiny", "source": "a"}), manifest, placed(5 * each)
    )
    assert kept.most_saved_states == 5, "a repair leaves surviving stages as they are"


def test_states_are_kept_behind_guesses_in_what_all_nodes_have_left(make_manifest: Any) -> None:
    """If little is left, half of it."""
    sizes = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "head_dim": 16,
    }
    manifest = make_manifest(
        model_type="qwen3_5_text", linear_num_value_heads=2, max_context=2048, **sizes
    )
    shape = parse_config(manifest.config)
    can = replace(FACTS, takes_guesses=True, keeps_states_of_guesses=True)

    def placed(left: int = 512 * MIB, facts: DeviceFacts = can, **changes: Any) -> Placement:
        values = {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "layers": "a=0:4,b=4:12",
            "concurrency": 3,
        }
        spec = parse_spec({**values, "dtype": "float32", "prefix_cache": True, **changes})
        free = (
            StageSizes(spec, manifest, shape, Load(1, 2)).needed_bytes(
                LayerRange(4, 12), NodeName("b")
            )
            + left
        )
        nodes = replace(node("a"), facts=can), replace(node("b", free), facts=facts)
        return SimplePlacer().place(spec, manifest, nodes)

    def slots(*options: Any, **changes: Any) -> tuple[int, int]:
        found = placed(*options, **changes)
        assert found.used_guess_slots == found.guess_slots
        return found.guess_slots, found.saved_states

    each, every = shape.state_bytes(LayerRange(4, 12), DType.FLOAT32), 3 + 3 * 2048 // 512
    assert slots() == (MOST_GUESSES, every)
    assert [slots(left * each) for left in (0, 1, 4, 9, 20)] == [
        (0, 0),
        (1, 0),
        (2, 2),
        (5, 4),
        (MOST_GUESSES, 13),
    ]
    assert slots(4 * each, prefix_cache=False) == (4, 0)
    few, none = placed(4 * each), placed(0)
    assert few.stages[1].workspace_bytes == none.stages[1].workspace_bytes + 4 * each
    assert (few.speculation, none.speculation) == (Speculation.GUESSES, Speculation.STATES)
    kept = sizes_of(parse_spec({"name": "tale", "model": "tiny", "source": "a"}), manifest, few)
    assert kept.most_guess_slots == 2, "a repair leaves surviving stages as they are"
    for other, reason in (
        (replace(can, keeps_states_of_guesses=False), Speculation.STATES),
        (replace(can, takes_guesses=False), Speculation.BITS),
    ):
        assert (placed(facts=other).speculation, slots(facts=other)) == (reason, (0, every))
    assert slots(speculation="off") == slots(max_time_per_token_s=1.0) == (0, every)


@pytest.mark.parametrize(
    ("family", "changes", "speculation"),
    [
        ("llama-plain", {}, Speculation.GUESSES),
        ("llama-plain", {"speculation": "off"}, Speculation.OFF),
        ("llama-plain", {"layers": "a=0:4,b=4:8,c=8:12"}, Speculation.GUESSES),
        ("llama-plain", {"layers": "a=0:4,b=4:8,c=8:12", "speculation": "on"}, Speculation.GUESSES),
        ("llama-plain", {"max_time_per_token_s": 0.1}, Speculation.PROMISE),
        ("llama-plain", {"max_inter_token_latency_s": 0.1}, Speculation.PROMISE),
        ("llama-plain", {"layers": "a=0:6,old=6:12"}, Speculation.BITS),
        ("llama-options", {}, Speculation.BITS),  # heads of 10
        ("llama-plain", {"dtype": "float16"}, Speculation.BITS),
        ("llama-plain", {"dtype": "float32", "kv_dtype": "float16"}, Speculation.BITS),
        ("llama-plain", {"dtype": "float32", "kv_dtype": "bfloat16"}, Speculation.GUESSES),
        ("llama-plain", {"dtype": "float16", "speculation": "on"}, Speculation.BITS),
        ("opt-plain", {}, Speculation.BITS),
        ("qwen3_5-text", {}, Speculation.GUESSES),
        ("qwen3_5-text", {"layers": "a=0:6,older=6:12"}, Speculation.STATES),
        ("qwen3_5-text", {"layers": "a=0:6,old=6:12"}, Speculation.BITS),
        ("qwen3_5-text", {"max_time_per_token_s": 0.1}, Speculation.PROMISE),
        ("qwen3_next-sparse-step", {}, Speculation.EXPERTS),
        ("bamba-options", {}, Speculation.BITS),
        ("qwen3_moe-sparse-step", {}, Speculation.EXPERTS),
    ],
)
def test_guesses_are_for_where_they_change_nothing(
    family: str, changes: Any, speculation: Speculation
) -> None:
    values = {"name": "tale", "model": "tiny", "source": "a", **changes}
    config = json.loads(VARIANTS[family].library_config().to_json_string(use_diff=False))
    if family.startswith("qwen3_moe"):
        config["head_dim"] = 16
    model = model_from_config("tiny", config)
    new = replace(FACTS, takes_guesses=True, keeps_states_of_guesses=True)
    known = {"old": FACTS, "older": replace(FACTS, takes_guesses=True)}
    names = [stage.partition("=")[0] for stage in changes.get("layers", "a=0:6,b=6:12").split(",")]
    nodes = [known.get(name, new) for name in names]
    assert speculation_of(parse_spec(values), model, nodes, MOST_GUESSES) is speculation


@pytest.mark.parametrize("layers", ["a=0:12", "a=0:4,b=4:9,c=9:12"])
@pytest.mark.parametrize("head", ["int8", "int4", "none"])
def test_a_tied_head_of_integers_is_counted_beside_the_embedding(
    layers: str, head: str, make_manifest: Any
) -> None:
    manifest = make_manifest(tied=True)
    spec = parse_spec(
        {"name": "tale", "model": "tiny", "source": "a", "dtype": "bfloat16", "layers": layers}
        | {"quantisation": {"*": "int4"}, "head_quantisation": head}
    )
    stages = SimplePlacer().place(spec, manifest, ABC).stages
    kept = Quantisation.of(IntegerFormat.INT4, head)
    for stage in stages:
        tensors = stage_tensors(manifest, stage.layers)
        assert stage.parameter_bytes == held_bytes(
            manifest.config, tensors, stage.layers, DType.BFLOAT16, kept
        )
    block = 64 * 64 * 3 + 3 * 64 * 128
    norm = 2 * 64
    embedding = 2 * 256 * 64
    blocks = 12 * (IntegerFormat.INT4.matrix_bytes(1, block) + 2 * norm)
    shared = head == "none" and len(stages) == 1
    head_bytes = (
        0 if shared else embedding if head == "none" else IntegerFormat(head).matrix_bytes(256, 64)
    )
    assert sum(stage.parameter_bytes for stage in stages) == blocks + norm + embedding + head_bytes


def test_quantisation_of_a_node_that_is_not_there(place: Any) -> None:
    with pytest.raises(NotFoundError) as info:
        place(*ABC, quantisation={"d": "int8"})
    assert info.value.field == "quantisation"


def test_the_model_gives_the_context_when_the_spec_does_not(place: Any) -> None:
    assert place(*ABC).kv_blocks == 128 // 16 * 2


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ("a=0:4,b=5:12", "LAYER_GAP"),
        ("a=0:4,b=4:11", "LAYER_GAP"),
        ("a=0:4,b=3:12", "LAYER_OVERLAP"),
        ("a=0:4,b=4:13", "LAYER_OUT_OF_RANGE"),
        ("a=0:4,b=4:4,c=4:12", "EMPTY_STAGE"),
        ("a=0:4,b=4:9,a=9:12", "DUPLICATE_NODE"),
        ("b=0:4,a=4:12", "SOURCE_NOT_FIRST"),
        ("a=0:4,q=4:12", "UNKNOWN_NODE"),
    ],
)
def test_a_list_that_cannot_be(place: Any, layers: str, reason: str) -> None:
    with pytest.raises(PlacementError) as info:
        place(*ABC, layers=layers)
    assert info.value.reason == reason
    assert info.value.field == ("source" if reason == "SOURCE_NOT_FIRST" else "layers")


@pytest.mark.parametrize("layers", ["", "b=0:4,a=4:12"])
@pytest.mark.parametrize(
    ("head_dim", "kind", "what"),
    [(24, "cpu", "multiple of 16; this model's is 24"), (16, "cuda", "not on the cuda of b")],
)
def test_keys_and_values_of_4_bits_are_refused_before_anything_is_placed(
    make_manifest: Any, layers: str, head_dim: int, kind: str, what: str
) -> None:
    manifest = make_manifest()
    manifest = replace(manifest, config_json=json.dumps(manifest.config | {"head_dim": head_dim}))
    nodes = [node("a"), replace(node("b"), facts=replace(FACTS, kind=kind))]
    values = {
        "name": "tale",
        "model": "tiny",
        "source": "b",
        "dtype": "float32",
        "kv_dtype": "int4",
    }
    spec = parse_spec(values | ({"layers": layers} if layers else {}))
    with pytest.raises(InvalidArgumentError, match=what) as refused:
        SimplePlacer().place(spec, manifest, nodes)
    assert (refused.value.field, refused.value.reason) == ("kv_dtype", "UNSUPPORTED_KV_DTYPE")
    assert "use bfloat16" in refused.value.message
    with pytest.raises(InvalidArgumentError, match=what):
        PlanningPlacer().place(PlacementProblem(spec, manifest, nodes, {}))


def test_nodes_that_cannot_serve(place: Any) -> None:
    with pytest.raises(NotFoundError) as not_found:
        place(*ABC, source="z")
    assert not_found.value.field == "source" and "a, b, c" in str(not_found.value)
    with pytest.raises(UnavailableError) as away:
        place(node("a", connected=False), node("b"))
    assert away.value.field == "source"
    with pytest.raises(UnavailableError) as away:
        place(node("a"), node("b", connected=False), layers="a=0:4,b=4:12")
    assert away.value.field == "layers" and "node b" in str(away.value)
    for field, value in (("exclude", ("z",)), ("reserve", {"z": 1})):
        with pytest.raises(NotFoundError) as not_found:
            place(*ABC, **{field: value})
        assert not_found.value.field == field
    with pytest.raises(PlacementError) as excluded:
        place(*ABC, exclude=("a",))
    assert excluded.value.field == "exclude"
    with pytest.raises(PlacementError):
        place(*ABC, exclude=("b",), layers="a=0:4,b=4:12")


def test_a_context_beyond_the_model(place: Any) -> None:
    with pytest.raises(InvalidArgumentError) as info:
        place(*ABC, max_context=129)
    assert info.value.field == "max_context" and "128" in str(info.value)


def test_a_node_without_memory_for_its_share_is_named_with_what_it_lacks(place: Any) -> None:
    whole = place(node("a"), node("b"), layers="a=0:6,b=6:12")
    stage = whole.stages[1]
    largest = 256 * 64 * 4
    needed = stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes + largest
    exact = place(node("a"), node("b", needed), layers="a=0:6,b=6:12")
    assert exact.stages == whole.stages
    with pytest.raises(ResourceExhaustedError) as info:
        place(node("a"), node("b", needed - 3 * MIB), layers="a=0:6,b=6:12")
    assert info.value.field == "layers"
    assert "node b is short of memory by 3.0 MiB" in str(info.value)
    with pytest.raises(ResourceExhaustedError):
        place(node("a"), node("b", needed), layers="a=0:6,b=6:12", reserve={"b": 1})


def test_a_stage_has_room_for_the_longest_slice_its_context_allows(make_manifest: Any) -> None:
    """And what another deployment finds left on the node is without it."""
    manifest = make_manifest(max_context=4096)

    def workspace(**changes: Any) -> list[int]:
        values = {"name": "tale", "model": "tiny", "source": "a", "dtype": "float32", **changes}
        placement = SimplePlacer().place(parse_spec(values), manifest, [node("a"), node("b")])
        for stage in placement.stages:
            assert (
                placed_bytes(stage)
                == stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes
            )
        return [stage.workspace_bytes for stage in placement.stages]

    row, logits = 4 * (4 * 64 + 3 * 128 + 2 * 2 * 64), 256 * (4 + 4)
    for context, tokens in ((128, 512), (1024, 1024), (4096, 2048)):
        expected = 64 * MIB + tokens * row
        assert workspace(max_context=context, layers="a=0:6,b=6:12", concurrency=2) == [
            expected,
            expected + logits,
        ]
    more, one = (workspace(layers="a=0:12", concurrency=4, micro_batches=m)[0] for m in (4, 1))
    assert more - one == 2 * 3 * 2048 * 64 * 4


def test_what_fits_the_source_stays_there(place: Any) -> None:
    assert cuts(place(*ABC)) == "a=0:12"
    assert cuts(place(node("a", 128 * MIB), node("b"), node("c"))) == "a=0:12"
    assert cuts(place(*ABC, source="b", concurrency=8)) == "b=0:12"


def test_what_does_not_fit_the_source_is_on_as_few_nodes_as_hold_it_those_with_most_memory(
    place: Any,
) -> None:
    tight = {"concurrency": 64}  # all layers take 91 MiB of it, and a half 79
    a = node("a", 85 * MIB)
    b = node("b", 85 * MIB)
    c = node("c", 88 * MIB)
    assert cuts(place(a, b, c, **tight)) == "a=0:6,c=6:12"
    assert cuts(place(a, b, **tight)) == "a=0:6,b=6:12"
    assert cuts(place(a, b, c, exclude=("c",), **tight)) == "a=0:6,b=6:12"
    assert cuts(place(a, b, node("c", connected=False), **tight)) == "a=0:6,b=6:12"
    assert cuts(place(a, b, c, reserve={"c": 4 * MIB}, **tight)) == "a=0:6,b=6:12"
    assert cuts(place(a, node("b", 10 * MIB), c, **tight)) == "a=0:6,c=6:12"
    three = cuts(place(*(replace(item, free_bytes=75 * MIB) for item in (a, b, c)), **tight))
    assert three == "a=0:4,b=4:8,c=8:12"


def test_what_does_not_fit_in_proportion_is_filled_up(place: Any) -> None:
    # The KV of many requests leaves little over: a third of the layers does not fit a node with a
    # third of the memory when its workspace comes off first.
    tight = place(node("a", 80 * MIB), node("b", 72 * MIB), concurrency=32)
    assert tight.stages[0].node_name == "a" and tight.stages[-1].layers.end == 12


def test_memory_that_is_short_everywhere(place: Any) -> None:
    with pytest.raises(ResourceExhaustedError) as info:
        place(node("a", 65 * MIB), node("b", 65 * MIB), concurrency=64)
    assert info.value.field == "layers" and info.value.reason == "MEMORY_SHORT"
    with pytest.raises(ResourceExhaustedError) as info:
        place(node("a", 1), node("b"))
    assert "node a" in str(info.value)


def test_of_two_nodes_with_one_name_the_connected_one_counts(place: Any) -> None:
    old = Candidate(NodeId("id-old"), NodeName("a"), "old:1", 1024 * MIB, False, FACTS)
    for nodes in ((old, node("a")), (node("a"), old)):
        assert place(*nodes).head.node_id == "id-a"


@given(
    memory=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    concurrency=st.integers(1, 64),
    source=st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_every_placement_covers_the_model_and_fits(
    make_manifest: Any, memory: list[int], concurrency: int, source: int
) -> None:
    nodes = [node(name, size * MIB) for name, size in zip("abcdef", memory, strict=False)]
    first = nodes[source % len(nodes)].name
    values = {
        "name": "tale",
        "model": "tiny",
        "source": first,
        "concurrency": concurrency,
        "dtype": "float32",
    }
    manifest = make_manifest()
    try:
        placement = SimplePlacer().place(parse_spec(values), manifest, nodes)
    except ResourceExhaustedError:
        return
    assert placement.head.node_name == first
    assert [
        layer for s in placement.stages for layer in range(s.layers.first, s.layers.end)
    ] == list(range(12))
    assert len({s.node_id for s in placement.stages}) == len(placement.stages)
    free = {candidate.node_id: candidate.free_bytes for candidate in nodes}
    for stage in placement.stages:
        assert len(stage.layers) > 0
        assert stage.parameter_bytes + stage.kv_bytes + stage.workspace_bytes <= free[stage.node_id]


@given(
    memory=st.lists(st.integers(60, 120), min_size=1, max_size=4), concurrency=st.integers(1, 64)
)
@settings(max_examples=60, deadline=None)
def test_a_node_that_holds_the_model_alone_has_it_alone(
    make_manifest: Any, memory: list[int], concurrency: int
) -> None:
    nodes = [node(name, size * MIB) for name, size in zip("abcd", memory, strict=False)]
    values = {"name": "tale", "model": "tiny", "source": "a", "concurrency": concurrency}
    manifest = make_manifest()

    def stages(**changes: Any) -> int:
        try:
            return len(SimplePlacer().place(parse_spec(values | changes), manifest, nodes).stages)
        except ResourceExhaustedError:
            return 0

    assert (stages(layers="a=0:12") == 1) == (stages() == 1)


def test_layers_of_the_ends_hold_embedding_and_head(place: Any, make_manifest: Any) -> None:
    placement = place(node("a"), layers="a=0:12")
    assert placement.stages[0].layers == LayerRange(0, 12)
    assert placement.stages[0].parameter_bytes == make_manifest().parameter_count * 4
