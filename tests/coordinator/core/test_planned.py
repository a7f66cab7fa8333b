"""Placement by measurements: the best is chosen, missing measurements are reported, and memory has
the last word."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.placement.by_memory import KV_BLOCK_TOKENS, SimplePlacer
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.placement.problem import PlacementProblem
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.placement.replicated import only_on, place_replicas
from edgeshard_coordinator.core.placement.source_choice import place_from_any
from edgeshard_coordinator.core.values.candidate import Candidate, held_bytes
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, disk_of, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.architectures import expected_tensors, parse_config, stage_tensors
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import LengthsFrom, Placement, Speculation
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Outlook, Traffic
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import Digest, ModelName, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import ModelManifest, TensorInfo
from edgeshard.domain.models.residency import in_disk_blocks, room_for_experts
from edgeshard.domain.nodes.device import BF16_PRODUCTS, DeviceFacts
from edgeshard.domain.nodes.profile import DiskProfile, EnergyProfile, LinkProfile
from edgeshard.planning.inputs.shapes import model_from_config
from tests.support.forms import in_form
from tests.support.sizes import parameter_bytes

KIB, MIB = 1 << 10, 1 << 20
Measured = Mapping[NodeId, Measurements]


def node(
    name: str, free: int = 1024 * MIB, model: str = "some CPU", connected: bool = True
) -> Candidate:
    facts = DeviceFacts("cpu", model, 2, 1024 * MIB, 1024 * MIB, False, "test")
    return Candidate(NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", free, connected, facts)


ABC = (node("a"), node("b"), node("c"))


def spec_of(**changes: Any) -> DeploymentSpec:
    values = {
        "name": "tale",
        "model": "tiny",
        "source": "a",
        "dtype": "float32",
        "concurrency": 4,
        **changes,
    }
    return parse_spec(values)


@pytest.fixture(scope="module")
def manifest(make_manifest: Callable[..., ModelManifest]) -> ModelManifest:
    return make_manifest()


@pytest.fixture(scope="module")
def measured(make_profile: Any, manifest: ModelManifest) -> Callable[..., Measured]:
    """Blocks of the given seconds by node, and links between all of these except `without`."""

    def make(
        without: tuple[str, ...] = (),
        latency_s: float = 1e-3,
        quantisation: Quantisation | None = None,
        **block_s: float,
    ) -> Measured:
        known = {}
        for name, seconds in block_s.items():
            profile = make_profile(
                manifest.config, seconds, DType.FLOAT32, quantisation=quantisation
            )
            links = {
                NodeId(f"id-{other}"): Reported(LinkProfile(latency_s, 1e9, 0.0, 9, 1 << 20), 0.0)
                for other in block_s
                if other != name and f"{name}{other}" not in without
            }
            known[NodeId(f"id-{name}")] = Measurements(
                {key_of(profile): Reported(profile, 0.0)}, links
            )
        return known

    return make


@pytest.fixture(scope="module")
def place(manifest: ModelManifest) -> Callable[..., Placement]:
    def run(nodes: Any, known: Measured, **changes: Any) -> Placement:
        return PlanningPlacer().place(PlacementProblem(spec_of(**changes), manifest, nodes, known))

    return run


def cuts(placement: Placement) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in placement.stages)


def test_a_note_names_the_rotary_factors_of_the_deployments_context(
    manifest: ModelManifest,
) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
    }
    config |= {
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rope_scaling": factors,
    }
    config |= {"original_max_position_embeddings": 128}
    digest = manifest.tensors[0].sha256
    tensors = [
        TensorInfo(t.name, DType.FLOAT32, t.shape, digest)
        for t in expected_tensors(config).values()
    ]
    phi = ModelManifest(ModelName("tiny"), "phi3", json.dumps(config), tuple(tensors), ())
    for max_context, words in (
        (0, "long, because the context of 512"),
        (128, "short, because the context of 128"),
    ):
        problem = PlacementProblem(spec_of(max_context=max_context), phi, ABC, {})
        assert f"Rotary factors: {words}" in PlanningPlacer().place(problem).note
    plain = PlanningPlacer().place(PlacementProblem(spec_of(), manifest, ABC, {}))
    assert "Rotary factors" not in plain.note


def test_the_fast_node_gets_what_the_source_need_not_hold(place: Any, measured: Any) -> None:
    placement = place(ABC, measured(a=1e-2, b=1e-3, c=5e-3), objective="latency")
    assert cuts(placement) == "a=0:1,b=1:12"
    figures = placement.predicted
    assert figures is not None and "compute of" in figures.bottleneck and figures.gap == 0
    # One block at 10 ms and eleven at 1 ms, each 17/16 for one sequence, two delays of 1 ms.
    assert figures.time_per_token_s == pytest.approx(1.0625 * 21e-3 + 2e-3, rel=0.05)
    assert (figures.requests, figures.prompt_tokens, figures.new_tokens) == (1, 64, 64), (
        "half of the context each"
    )
    assert (figures.objective, figures.lengths) == ("latency", "default") and not placement.note
    assert len(placement.costs) == 2, "the head sizes its steps by what its stages cost"


def test_energy_is_planned_where_the_power_of_every_node_is_known(
    place: Any, measured: Any
) -> None:
    known = measured(a=1e-2, b=1e-3, c=1e-3)
    watts = {"a": EnergyProfile(3.0, 9.0, "rapl"), "b": EnergyProfile(80.0, 300.0, "nvml")}
    for name, energy in watts.items():
        node_id = NodeId(f"id-{name}")
        ((key, reported),) = known[node_id].profiles.items()
        profile = replace(reported.value, energy=energy)
        known[node_id] = replace(known[node_id], profiles={key: Reported(profile, 0.0)})
    fast = place(ABC, known, exclude=["c"], objective="request")
    assert cuts(fast) == "a=0:1,b=1:12"
    placement = place(ABC, known, exclude=["c"], objective="energy")
    assert cuts(placement) == "a=0:12" and placement.predicted.joules_per_token > 0
    alone = place(ABC, known, exclude=["c"], objective="energy", mode="sequential")
    assert alone.micro_batches == 1 and alone.predicted.requests == 1
    with pytest.raises(InvalidArgumentError, match="power of c is unknown") as caught:
        place(ABC, known, objective="energy")
    assert caught.value.reason == "UNKNOWN_POWER"


def test_by_hand_it_stays_by_hand_with_figures(
    place: Any, measured: Any, manifest: ModelManifest
) -> None:
    layers = "a=0:4,b=4:12"
    placement = place(ABC, measured(a=1e-2, b=1e-3), layers=layers, objective="latency")
    plain = SimplePlacer().place(spec_of(layers=layers), manifest, ABC)
    assert placement.stages == plain.stages and placement.kv_blocks == plain.kv_blocks
    assert placement.predicted is not None and placement.predicted.gap is None
    assert placement.predicted.time_per_token_s > 4e-2
    assert placement.note.startswith("Placed by hand") and "c" not in placement.note.split()


def test_what_is_not_measured_is_placed_by_memory_and_named(
    place: Any, measured: Any, manifest: ModelManifest
) -> None:
    placement = place(ABC, measured(a=1e-2, b=1e-3))
    assert placement.predicted is None and not placement.costs
    assert placement.stages == SimplePlacer().place(spec_of(), manifest, ABC).stages
    assert (
        "Placed by memory, on as few nodes as hold it: not measured for tiny in float32: c;"
        in placement.note
    )
    assert "edgectl profile --model tiny --dtype float32" in placement.note
    assert place(ABC, measured(a=1e-2, b=1e-3), exclude=["c"]).predicted is not None
    other = place(ABC, measured(a=1e-2, b=1e-3, c=1e-3), dtype="bfloat16")
    assert other.predicted is None, "times of another dtype are no times"
    by_hand = place(ABC, measured(a=1e-2, b=1e-3), layers="a=0:4,c=4:12", max_time_per_token_s=1.0)
    assert (
        by_hand.note.startswith("Not predicted: not measured")
        and "max_time_per_token_s" in by_hand.note
    )


def test_nodes_quantised_alike_are_planned_by_their_own_times(place: Any, measured: Any) -> None:
    int8 = {"quantisation": {"*": "int8"}, "objective": "latency"}
    packed = measured(a=1e-2, b=1e-3, c=5e-3, quantisation=Quantisation.INT8)
    placement = place(ABC, packed, **int8)
    assert cuts(placement) == "a=0:1,b=1:12" and placement.predicted is not None
    whole = place(ABC, measured(a=1e-2, b=1e-3, c=5e-3), objective="latency")
    assert placement.stages[1].parameter_bytes < 0.5 * whole.stages[1].parameter_bytes
    assert place(ABC, measured(a=1e-2, b=1e-3, c=5e-3), **int8).note.startswith(
        "Placed by memory, on as few nodes as hold it: not measured for tiny in int8 with float32: "
        "a, b, c; run "
        "`edgectl profile --model tiny --dtype float32 --quantise int8`"
    )
    each = {"quantisation": {"a": "int8", "b": "int8"}, "exclude": ["c"]}
    assert place(ABC, packed, **each).predicted is not None, (
        "a node that is left out may be as it likes"
    )


def test_nodes_quantised_differently_are_placed_by_memory(place: Any, measured: Any) -> None:
    packed = measured(a=1e-2, b=1e-3, c=5e-3, quantisation=Quantisation.INT8)
    mixed = place(ABC, packed, quantisation={"*": "int8", "b": "int4"})
    assert mixed.predicted is None and mixed.note.startswith(
        "Placed by memory, on as few nodes as hold it: nodes that keep their weights"
    )
    assert (
        place(ABC, packed, quantisation={"*": "int8", "b": "int4"}, layers="a=0:4,c=4:12").predicted
        is not None
    )


def test_a_link_that_is_not_measured_is_not_used_and_named(place: Any, measured: Any) -> None:
    known = measured(a=1e-2, b=1e-3, c=5e-3, without=("ab",))
    placement = place(ABC, known, objective="latency")
    assert (
        cuts(placement).startswith("a=0:1,c=1:")
        and "Not used: the link a -> b is not measured yet" in placement.note
    )
    by_hand = place(ABC, known, layers="a=0:4,b=4:12")
    assert by_hand.predicted is None and "the link a -> b is not measured yet" in by_hand.note


def test_a_data_sheet_says_that_it_is_one(place: Any, measured: Any) -> None:
    nodes = (node("a"), node("b", model="NVIDIA GeForce RTX 4090"))
    known = dict(measured(a=1e-2, b=1e-2))
    known[NodeId("id-b")] = Measurements({}, known[NodeId("id-b")].links)
    placement = place(nodes, known)
    assert placement.predicted is not None and "estimated from data sheets: b" in placement.note


def test_many_requests_are_spread_over_the_nodes(place: Any, measured: Any) -> None:
    known = measured(a=1e-2, b=1e-2, c=1e-2)
    alone = place(ABC, known, concurrency=1)
    many = place(ABC, known, concurrency=24, objective="throughput")
    assert len(alone.stages) == 1 and (alone.micro_batch, alone.micro_batches) == (1, 1)
    assert len(many.stages) == 3 and many.micro_batches > 1
    assert many.predicted.throughput_tps > 2 * alone.predicted.throughput_tps
    assert [placement.kv_blocks for placement in (alone, many)] == [
        128 // KV_BLOCK_TOKENS,
        24 * 128 // KV_BLOCK_TOKENS,
    ]


@pytest.mark.parametrize(
    "changes", [{}, {"layers": "a=0:6,b=6:12"}, {"objective": "latency"}], ids=str
)
def test_the_specs_own_number_of_micro_batches_is_placed(
    place: Any, measured: Any, changes: Any
) -> None:
    placement = place(
        ABC, measured(a=1e-2, b=1e-2, c=1e-2), concurrency=8, micro_batches=3, **changes
    )
    assert placement.micro_batches == 3 and placement.micro_batch <= 2
    assert (
        placement.predicted.requests == 3 * placement.micro_batch or "latency" in changes.values()
    )


def test_latency_decides_the_cut_and_concurrency_the_load(place: Any, measured: Any) -> None:
    known = measured(a=1e-2, b=1e-2, c=1e-2)
    placement = place(ABC, known, objective="latency")
    assert len(placement.stages) == 1 and placement.micro_batch * placement.micro_batches == 4
    assert placement.predicted.throughput_tps < 1.1 / placement.predicted.time_per_token_s, (
        "the figures are one's alone"
    )
    sequential = place(ABC, known, mode="sequential")
    assert (sequential.micro_batch, sequential.micro_batches) == (1, 1) and len(
        sequential.stages
    ) == 1


def test_a_limit_that_cannot_be_kept(place: Any, measured: Any) -> None:
    known = measured(a=1e-2, b=1e-2, c=1e-2)
    with pytest.raises(FailedPreconditionError) as info:
        place(ABC, known, max_time_per_token_s=1e-3)
    assert (
        info.value.field == "max_time_per_token_s"
        and "above max_time_per_token" in info.value.message
    )
    assert (
        "does not meet" in place(ABC, known, max_time_per_token_s=1e-3, layers="a=0:4,b=4:12").note
    )
    kept = place(ABC, known, max_time_per_token_s=0.15)
    assert kept.predicted.time_per_token_s <= 0.15


def test_what_is_reserved_stays_free(place: Any, measured: Any) -> None:
    known = measured(a=1e-2, b=1e-3, c=5e-3)
    placement = place(ABC, known, objective="latency", reserve={"b": 1000 * MIB})
    assert "b" not in {stage.node_name for stage in placement.stages}
    assert place(ABC, known, exclude=["b"]).stages[-1].node_name != "b"


def test_memory_that_is_short_everywhere_says_by_how_much(place: Any, measured: Any) -> None:
    small = [node(name, 64 * MIB) for name in "abc"]
    with pytest.raises(ResourceExhaustedError) as info:
        place(small, measured(a=1e-2, b=1e-2, c=1e-2), concurrency=64)
    assert "short" in info.value.message and info.value.field == "layers"


@pytest.mark.parametrize("changes", [{}, {"layers": "a=0:6,b=6:12"}])
def test_a_refusal_names_the_concurrency_that_fits(place: Any, changes: dict[str, Any]) -> None:
    nodes = [node(name, 80 * MIB) for name in "ab"]
    with pytest.raises(ResourceExhaustedError, match=r"; concurrency \d+ fits$") as info:
        place(nodes, {}, concurrency=1000, **changes)
    fitting = int(info.value.message.split()[-2])
    assert 1 < fitting < 1000 and place(nodes, {}, concurrency=fitting, **changes)
    with pytest.raises(ResourceExhaustedError):
        place(nodes, {}, concurrency=fitting + 1, **changes)
    with pytest.raises(ResourceExhaustedError) as none:
        place([node("a", 1)], {}, concurrency=1000)
    assert "concurrency 0" not in none.value.message


def test_less_memory_is_fewer_requests_at_once(place: Any, measured: Any) -> None:
    """By memory shares this is refused: not all requests fit at once."""
    nodes = [node(name, 69 * MIB) for name in "abc"]
    known = measured(a=1e-2, b=1e-2, c=1e-2)
    with pytest.raises(ResourceExhaustedError):
        place(nodes, {}, concurrency=300)
    placement = place(nodes, known, concurrency=300)
    requests = placement.micro_batch * placement.micro_batches
    assert placement.kv_blocks == requests * 128 // KV_BLOCK_TOKENS and 0 < requests < 300
    assert f"Memory holds {requests} of the 300 requests at full length" in placement.note


def test_where_links_are_missing_and_nothing_can_be_planned_memory_decides(
    place: Any, measured: Any
) -> None:
    """The source is too small, and no link from it is known."""
    nodes = [node("a", 67 * MIB), node("b"), node("c")]
    known = measured(a=1e-2, b=1e-2, c=1e-2, without=("ab", "ac"))
    placement = place(nodes, known, concurrency=8)
    assert placement.predicted is None and len(placement.stages) > 1
    assert (
        placement.note.startswith("Placed by memory")
        and "a -> b, a -> c are not measured yet" in placement.note
    )


def test_a_node_that_is_away_is_refused_as_ever(place: Any, measured: Any) -> None:
    with pytest.raises(UnavailableError):
        place((node("a", connected=False), node("b")), measured(a=1e-2, b=1e-2))


@given(
    rooms=st.lists(st.integers(66 << 10, 76 << 10), min_size=1, max_size=4),
    seconds=st.lists(st.sampled_from([1e-3, 3e-3, 1e-2]), min_size=4, max_size=4),
    concurrency=st.sampled_from([1, 3, 8, 40]),
    objective=st.sampled_from(["latency", "throughput", "auto"]),
    kv_dtype=st.sampled_from(["float32", "float16"]),
    reserved=st.integers(0, 4 << 10),
)
@settings(max_examples=60, deadline=None)
def test_no_plan_exceeds_what_the_check_allows(
    measured: Any,
    manifest: ModelManifest,
    rooms: list[int],
    seconds: list[float],
    concurrency: int,
    objective: str,
    kv_dtype: str,
    reserved: int,
) -> None:
    """The check is written again here, from the tensors: a plan passes it, or is refused in the
    planner's own words."""
    names = "abcd"[: len(rooms)]
    nodes = [node(name, room * KIB) for name, room in zip(names, rooms, strict=True)]
    changes = {
        "concurrency": concurrency,
        "objective": objective,
        "kv_dtype": kv_dtype,
        "reserve": {"a": reserved * KIB},
    }
    spec = spec_of(**changes)
    try:
        placement = PlanningPlacer().place(
            PlacementProblem(
                spec, manifest, nodes, measured(**dict(zip(names, seconds, strict=False)))
            )
        )
    except ResourceExhaustedError as error:
        assert error.message.startswith("no placement fits"), (
            "the check refused what the planner had allowed"
        )
        return
    shape = parse_config(manifest.config)
    assert placement.kv_blocks * KV_BLOCK_TOKENS >= shape.max_context, (
        "one request of the longest context fits"
    )
    room_of = dict(zip(names, rooms, strict=True))
    hidden, inner = shape.hidden_size, manifest.config["intermediate_size"]
    workspace = 64 * MIB + 512 * 4 * (4 * hidden + 3 * inner + 2 * placement.micro_batches * hidden)
    logits = placement.micro_batch * shape.vocab_size * (4 + 4)
    for stage in placement.stages:
        tensors = list(stage_tensors(manifest, stage.layers))
        kv = (
            placement.kv_blocks
            * KV_BLOCK_TOKENS
            * shape.kv_bytes_per_token(stage.layers, spec.effective_kv_dtype)
        )
        needed = (
            parameter_bytes(tensors, spec.dtype)
            + kv
            + 4 * max(tensor.element_count for tensor in tensors)
        )
        needed += workspace + logits * (stage is placement.stages[-1])
        assert needed <= room_of[stage.node_name] * KIB - spec.reserve.get(stage.node_name, 0)
    assert placement.stages[0].node_name == "a"


@pytest.mark.parametrize(
    ("bits", "told"),
    [(("3f", "3f"), ""), (("3f", "a0"), "(a 3f, b a0)"), (("3f", ""), "(a 3f, b none)")],
)
def test_a_note_says_when_the_nodes_compute_different_bits(
    place: Callable[..., Placement],
    measured: Callable[..., Measured],
    bits: tuple[str, str],
    told: str,
) -> None:
    nodes = [
        replace(one, facts=replace(one.facts, bits_fingerprint=mine))
        for one, mine in zip((node("a"), node("b")), bits, strict=True)
    ]
    note = place(nodes, measured(a=1e-3, b=1e-3), layers="a=0:4,b=4:12").note
    assert told in note and ("Bits fingerprints differ" in note) == bool(told)
    assert "Bits" not in place([nodes[0]], measured(a=1e-3)).note


def test_a_note_names_the_nodes_whose_bits_are_their_own_by_bf16_products(
    place: Any, measured: Any
) -> None:
    own, other = node("a"), node("b")
    own = replace(
        own, facts=replace(own.facts, bits_fingerprint="3f", software=f"torch, {BF16_PRODUCTS}")
    )
    other = replace(other, facts=replace(other.facts, bits_fingerprint="a0"))
    times = measured(a=1e-3, b=1e-3)
    note = place([own, other], times, layers="a=0:4,b=4:12").note
    assert (
        "a multiplies bfloat16 by AVX512-BF16" in note
        and "bf16_products = false" in note
        and "cost" in note
    )
    same = replace(other, facts=replace(other.facts, bits_fingerprint="3f"))
    assert "AVX512-BF16" not in place([own, same], times, layers="a=0:4,b=4:12").note


def test_a_note_names_the_nodes_that_were_busy_while_measured(place: Any, measured: Any) -> None:
    known = dict(measured(a=1e-2, b=1e-3, c=5e-3))
    assert "Doubtful" not in place(ABC, known).note
    ((key, reported),) = known[NodeId("id-c")].profiles.items()
    busy = replace(reported, value=replace(reported.value, others_share=0.4))
    known[NodeId("id-c")] = replace(known[NodeId("id-c")], profiles={key: busy})
    for layers in ("", "a=0:1,c=1:12"):
        note = place(ABC, known, **({"layers": layers} if layers else {})).note
        assert "Doubtful figures of c: busy while measured (others took 40% of its cores)." in note


def served(prompt_tokens: int, new_tokens: int) -> Traffic:
    return NO_TRAFFIC.after(prompt_tokens, new_tokens).after(prompt_tokens, new_tokens)


def outlook_of(
    manifest: ModelManifest, known: Measured, placement: Placement, traffic: Traffic, **changes: Any
) -> Outlook:
    return PlanningPlacer().outlook(
        PlacementProblem(spec_of(**changes), manifest, ABC, known, traffic), placement
    )


def test_lengths_given_or_seen_are_planned_for_and_memory_goes_by_the_limits(
    measured: Any, manifest: Any
) -> None:
    known = measured(a=1e-2, b=1e-2, c=1e-2)
    plain = PlanningPlacer().place(
        PlacementProblem(spec_of(objective="request"), manifest, ABC, known)
    )
    given = PlanningPlacer().place(
        PlacementProblem(
            spec_of(objective="request", prompt_tokens=100, new_tokens=2), manifest, ABC, known
        )
    )
    seen = PlanningPlacer().place(
        PlacementProblem(spec_of(objective="request"), manifest, ABC, known, served(100, 2))
    )
    assert (
        given.predicted is not None and seen.predicted is not None and plain.predicted is not None
    )
    assert (given.predicted.prompt_tokens, given.predicted.new_tokens, given.predicted.lengths) == (
        100,
        2,
        "given",
    )
    assert (
        seen.predicted == replace(given.predicted, lengths=LengthsFrom.SEEN)
        and seen.stages == given.stages
    )
    assert plain.kv_blocks == given.kv_blocks, (
        "the pool holds the longest requests whatever is typical"
    )


def test_a_placement_that_is_best_for_its_traffic_has_none_better(
    place: Any, measured: Any, manifest: Any
) -> None:
    known = measured(a=1e-3, b=1e-3, c=1e-3)
    placement = place(ABC, known, objective="request", prompt_tokens=2, new_tokens=100)
    assert cuts(placement) == "a=0:12"
    found = outlook_of(manifest, known, placement, served(2, 100), objective="request")
    assert found.better is None and found.expected is not None and not found.note
    assert found.expected.request_s == pytest.approx(placement.predicted.request_s)


def test_the_gain_is_between_two_predictions_for_the_traffic_seen(
    place: Any, measured: Any, manifest: Any
) -> None:
    known = measured(a=1e-2, b=1e-3, c=5e-3)
    by_hand = place(ABC, known, objective="request", layers="a=0:12")
    found = outlook_of(
        manifest, known, by_hand, served(60, 20), objective="request", layers="a=0:12"
    )
    best = PlanningPlacer().place(
        PlacementProblem(spec_of(objective="request"), manifest, ABC, known, served(60, 20))
    )
    assert found.better is not None and found.expected is not None and best.predicted is not None
    assert found.better.request_s == best.predicted.request_s
    assert (
        ",".join(f"{stage.node}={stage.layers}" for stage in found.layers)
        == cuts(best)
        == "a=0:1,b=1:12"
    )
    assert (
        found.gain == pytest.approx(1 - best.predicted.request_s / found.expected.request_s)
        and found.gain > 0.5
    )
    rate = outlook_of(
        manifest, known, by_hand, served(60, 20), objective="throughput", layers="a=0:12"
    )
    assert rate.better is not None and rate.expected is not None
    assert rate.gain == pytest.approx(rate.better.throughput_tps / rate.expected.throughput_tps - 1)


def test_what_cannot_be_weighed_says_why(place: Any, measured: Any, manifest: Any) -> None:
    known = measured(a=1e-2, b=1e-3)
    placement = place(ABC, known, layers="a=0:12")
    found = outlook_of(manifest, known, placement, served(60, 20))
    assert (
        found.better is None
        and found.expected is not None
        and "not measured for tiny in float32: c" in found.note
    )
    nothing = outlook_of(manifest, {}, placement, served(60, 20))
    assert nothing.expected is None and "not measured" in nothing.note


def with_disks(known: Measured, **rates: float) -> Measured:
    """The same with the rates at which the nodes' disks are read, in bytes a second."""
    found = dict(known)
    for name, rate in rates.items():
        node_id = NodeId(f"id-{name}")
        ((key, reported),) = found[node_id].profiles.items()
        profile = replace(reported.value, disk=DiskProfile(rate, 1 << 40))
        found[node_id] = replace(found[node_id], profiles={key: Reported(profile, 0.0)})
    return found


def test_a_nodes_disk_is_as_its_newest_profile_has_it(measured: Any) -> None:
    known = with_disks(measured(a=1e-2), a=1e9)[NodeId("id-a")]
    ((key, reported),) = known.profiles.items()
    assert disk_of(None) is None and disk_of(replace(known, profiles={})) is None
    newer = Reported(replace(reported.value, disk=DiskProfile(2e9, 1, 5e8)), 7.0)
    without = Reported(replace(reported.value, disk=None), 9.0)
    both = replace(
        known,
        profiles={
            key: newer,
            (key[0], DType.FLOAT16, None): reported,
            ("x", key[1], None): without,
        },
    )
    assert disk_of(known) == reported.value.disk and disk_of(both) == newer.value.disk


@pytest.fixture(scope="module")
def short(place: Any, measured: Any) -> int:
    """Memory of one node that lacks the room for some of the layers, with one request."""
    whole = place((node("a"),), measured(a=1e-2), concurrency=1).stages[0]
    return int(held_bytes(whole) - 4 * whole.parameter_bytes // 12)


def test_a_node_whose_memory_is_short_streams_where_it_may(
    place: Any, measured: Any, short: int
) -> None:
    known = with_disks(measured(a=1e-2), a=1e9)
    with pytest.raises(ResourceExhaustedError) as info:
        place((node("a", short),), known, concurrency=1)
    assert "with --allow-streaming it would run: a holds " in info.value.message
    placement = place((node("a", short),), known, concurrency=1, allow_streaming=True)
    (stage,) = placement.stages
    assert (
        placement.streams
        and 0 < stage.streamed_bytes < stage.weight_budget_bytes + stage.streamed_bytes
    )
    assert stage.parameter_bytes == stage.weight_budget_bytes and held_bytes(stage) <= short
    assert (
        "Streams weights: a holds " in placement.note and " a day from its disk" in placement.note
    )
    assert "memory in a would bring" in placement.note
    assert placement.predicted is not None and placement.predicted.time_per_token_s > 0.12
    read_s = stage.streamed_bytes / 1e9
    assert all(seconds > read_s for seconds in placement.costs[0].decode_s), (
        "the head knows what reading takes"
    )


def test_nothing_streams_where_memory_is_enough(place: Any, measured: Any) -> None:
    known = with_disks(measured(a=1e-2, b=1e-3), a=1e9, b=1e9)
    assert place(ABC[:2], known, allow_streaming=True).stages == place(ABC[:2], known).stages


def test_by_hand_and_without_measurements_it_streams_as_well(
    place: Any, measured: Any, short: int
) -> None:
    known = with_disks(measured(a=1e-2), a=1e9)
    by_hand = place(
        (node("a", short),), known, concurrency=1, allow_streaming=True, layers="a=0:12"
    )
    assert by_hand.streams and by_hand.predicted is not None and "Streams weights" in by_hand.note
    unknown = place(
        (node("a", short),), measured(a=1e-2), concurrency=1, allow_streaming=True, layers="a=0:12"
    )
    assert unknown.streams and unknown.predicted is None and "was not measured" in unknown.note
    blind = place((node("a", short),), {}, concurrency=1, allow_streaming=True)
    assert blind.streams and blind.predicted is None


@pytest.fixture(scope="module")
def mixture(make_manifest: Callable[..., ModelManifest]) -> ModelManifest:
    """Six layers of 16 experts; a token chooses two."""
    config = make_manifest(layers=6).config | {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "head_dim": 16,
    }
    tensors = tuple(
        TensorInfo(
            t.name if t.name == "lm_head.weight" else f"model.{t.name}",
            DType.FLOAT32,
            t.shape,
            Digest("a" * 64),
        )
        for t in expected_tensors(config).values()
    )
    return ModelManifest(ModelName("tiny"), "qwen3_moe", json.dumps(config), tensors, ())


def test_a_mixture_that_is_too_large_caches_experts_as_the_agent_will(
    mixture: ModelManifest, make_profile: Any
) -> None:
    profile = replace(
        make_profile(mixture.config, 1e-3, DType.FLOAT32), disk=DiskProfile(1e8, 1 << 40)
    )
    known = {NodeId("id-a"): Measurements({key_of(profile): Reported(profile, 0.0)}, {})}
    blocks = model_from_config("tiny", mixture.config).blocks
    experts = [size for block in blocks for size in block.expert_bytes(DType.FLOAT32)]
    every = sum(map(in_disk_blocks, experts))

    def placed(memory: int, measured: Measured, **changes: Any) -> Placement:
        spec = spec_of(concurrency=1, allow_streaming=True, **changes)
        return PlanningPlacer().place(
            PlacementProblem(spec, mixture, (node("a", memory),), measured)
        )

    whole = placed(1 << 30, known).stages[0]
    memory = held_bytes(whole) - every // 2
    for measured, changes in (
        (known, {}),
        (known, {"layers": "a=0:6"}),
        ({}, {"layers": "a=0:6"}),
        ({}, {}),
    ):
        placement = placed(memory, measured, **changes)
        (stage,) = placement.stages
        assert held_bytes(stage) <= memory
        cached = room_for_experts(
            whole.parameter_bytes - sum(experts), experts, stage.weight_budget_bytes
        )
        assert cached is not None and stage.streamed_bytes == every - cached
        if not measured:
            continue
        assert "of experts and reads the others from its disk at 0.1 GB/s" in placement.note
        (cost,) = placement.costs
        read_s = stage.streamed_bytes * 2 / 16 / 1e8
        assert 0.95 * read_s < cost.step_s([(20, 1)]) < 1.2 * read_s + 0.01


@pytest.mark.parametrize("layers", [{}, {"layers": "a=0:6"}], ids=["planned", "by hand"])
def test_a_mixture_guesses_where_its_rows_were_measured_and_its_experts_are_in_memory(
    mixture: ModelManifest, make_profile: Any, layers: dict[str, str]
) -> None:
    profile = replace(
        make_profile(mixture.config, 1e-3, DType.FLOAT32), disk=DiskProfile(1e8, 1 << 40)
    )
    known = {NodeId("id-a"): Measurements({key_of(profile): Reported(profile, 0.0)}, {})}

    def placed(
        memory: int, measured: Measured, takes_guesses: bool = True, **changes: Any
    ) -> Placement:
        spec = spec_of(concurrency=1, allow_streaming=True, **layers, **changes)
        box = node("a", memory)
        box = replace(box, facts=replace(box.facts, takes_guesses=takes_guesses))
        return PlanningPlacer().place(PlacementProblem(spec, mixture, (box,), measured))

    whole = placed(1 << 30, known)
    assert whole.costs and whole.speculation is Speculation.GUESSES
    assert placed(1 << 30, {}).speculation is Speculation.EXPERTS
    assert placed(1 << 30, known, takes_guesses=False).speculation is Speculation.BITS
    assert placed(1 << 30, known, max_time_per_token_s=9.0).speculation is Speculation.PROMISE
    short = placed(held_bytes(whole.stages[0]) - (1 << 20), known)
    assert short.streams and short.costs and short.speculation is Speculation.EXPERTS
    box = node("a")
    box = replace(box, facts=replace(box.facts, takes_guesses=True))
    again = PlanningPlacer().repair(
        PlacementProblem(spec_of(concurrency=1), mixture, (box,), known), whole, Lost()
    )
    assert again.speculation is Speculation.GUESSES


def test_the_spec_says_how_many_micro_batches_stream_together(
    place: Any, measured: Any, short: int
) -> None:
    known = with_disks(measured(a=1e-4), a=1e6)
    placement = place(
        (node("a", short + (1 << 20)),), known, concurrency=4, allow_streaming=True, micro_batches=2
    )
    assert placement.streams and placement.micro_batches == 2 and placement.sweep in (1, 2)


def test_energy_and_streaming_are_refused_together() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        spec_of(objective="energy", allow_streaming=True)
    assert caught.value.field == "allow_streaming"


def test_auto_replicas_are_the_best_of_all_choices_by_the_planners_own_figures(
    manifest: ModelManifest, measured: Any
) -> None:
    """Sites of different nodes, some of which can hold the whole model. The expected number of
    pipelines has the highest total rate; the test finds it by planning each choice of disjoint sets
    of nodes."""
    kinds: set[str] = set()
    for seed in range(in_form(5, 30)):
        dice = random.Random(seed)
        nodes = tuple(
            node(name, free=dice.choice((67, 67, 200)) * MIB)
            for name in "abcd"[: 4 if seed % 6 == 5 else 3]
        )
        known = measured(
            **{str(one.name): dice.choice((1e-3, 2e-3, 8e-3)) for one in nodes}, latency_s=1e-4
        )
        spec = parse_spec(
            {
                "name": "tale",
                "model": "tiny",
                "dtype": "float32",
                "concurrency": 2,
                "replicas": "auto",
            }
        )

        def on(
            candidates: Sequence[Candidate], spec: DeploymentSpec = spec, known: Any = known
        ) -> Placement:
            def place(sourced: DeploymentSpec, there: Sequence[Candidate]) -> Placement:
                return PlanningPlacer().place(PlacementProblem(sourced, manifest, there, known))

            return place_from_any(spec, candidates, place)

        def rate(placement: Placement) -> float:
            return 0.0 if placement.predicted is None else placement.predicted.throughput_tps

        rates = {}
        for size in range(1, len(nodes) + 1):
            for group in itertools.combinations([str(one.name) for one in nodes], size):
                with suppress(ResourceExhaustedError):
                    rates[group] = rate(on(only_on(nodes, group)))
        best = max(sum(rates[group] for group in chosen) for chosen in _disjoint(list(rates)))
        found = place_replicas(spec, nodes, on)
        assert sum(map(rate, found)) == pytest.approx(best, rel=1e-9)
        used = [stage.node_name for placement in found for stage in placement.stages]
        assert len(used) == len(set(used))
        kinds |= {"one" if len(found) == 1 else "several"}
        kinds |= {"pipeline" if len(placement.stages) > 1 else "box" for placement in found}
    assert kinds == {"one", "several", "pipeline", "box"}


def _disjoint(groups: list[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Every choice of groups that have no node in common."""
    for index, group in enumerate(groups):
        yield [group]
        left = [other for other in groups[index + 1 :] if not set(other) & set(group)]
        yield from ([group, *further] for further in _disjoint(left))
