"""A site as its coordinator knows it becomes a problem for the planner, which contains no
unmeasured figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.device import DeviceFacts, Node
from edgeshard.domain.nodes.profile import EnergyProfile, LinkProfile, MeasuredLink
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import Power, power_of, without_power
from edgeshard.planning.inputs.catalogue import CATALOGUE, recognise
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, model_from_config
from edgeshard.planning.inputs.site_cluster import (
    LOADING_ITEMSIZE,
    NOT_MEASURED,
    SiteCluster,
    site_cluster,
    site_problem,
)
from edgeshard.planning.search.plan import plan
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stage_bytes

MODEL = "llama2-7b"
CONFIG = BUILT_IN_CONFIGS[MODEL]
GB = 10**9


def node(name: str, model: str = "some CPU", free: int = 40 * GB, connected: bool = True) -> Node:
    facts = DeviceFacts("cpu", model, 8, 64 * GB, 60 * GB, False, "test")
    return Node(
        NodeId(f"id-{name}"), NodeName(name), f"{name}:7000", 1, facts, connected, 0.0, free
    )


def link(
    sender: str, receiver: str, bandwidth_bps: float = 1e9, latency_s: float = 1e-3
) -> MeasuredLink:
    profile = LinkProfile(latency_s, bandwidth_bps, 0.0, 9, 1 << 20)
    return MeasuredLink(NodeId(f"id-{sender}"), NodeId(f"id-{receiver}"), profile)


NODES = (node("c"), node("a"), node("b"))
LINKS = tuple(link(sender, receiver) for sender, receiver in permutations("abc", 2))


@pytest.fixture
def cluster(make_profile: Any) -> Callable[..., SiteCluster]:
    def make(
        nodes: Any = NODES, links: Any = LINKS, measured: str = "abc", **options: Any
    ) -> SiteCluster:
        profiles = {NodeId(f"id-{name}"): make_profile(CONFIG, block_s=1e-2) for name in measured}
        return site_cluster(
            nodes,
            links,
            profiles,
            **{"model": MODEL, "dtype": DType.BFLOAT16, "source": "b", **options},
        )

    return make


def problem(site: SiteCluster, **options: Any) -> PlanProblem:
    made = site_problem(site, model_from_config(MODEL, CONFIG), **options)
    made.check()
    return made


def test_measured_nodes_have_their_times_and_the_memory_that_is_left(cluster: Any) -> None:
    site = cluster(
        nodes=(node("c", free=7 * GB), *NODES[1:]), links=(*LINKS[1:], link("a", "b", 5e6, 0.02))
    )
    assert site.cluster.names == ("b", "a", "c"), "the source first, the others by name"
    assert set(site.times) == {"a", "b", "c"} and not site.estimated and not site.unmeasured
    memory = {known.name: known.device.usable_bytes for known in site.cluster.nodes}
    assert memory == {"a": 40 * GB, "b": 40 * GB, "c": 7 * GB}
    known = site.cluster.links[("a", "b")]
    assert (known.bandwidth_bps, known.latency_s) == (5e6, 0.02)
    assert site.cluster.links[("b", "a")].bandwidth_bps == 1e9
    decode = Costs(problem(site)).decode(Load())
    assert decode.compute_s[0, 0] == pytest.approx(1e-2 * (1 + 1 / 16), rel=0.02)


def test_a_node_that_nobody_measured_makes_the_site_unplannable_by_name(cluster: Any) -> None:
    with pytest.raises(FailedPreconditionError) as info:
        cluster(measured="b")
    assert info.value.reason == NOT_MEASURED and "a, c" in info.value.message
    assert "edgectl profile --model llama2-7b --dtype bfloat16" in info.value.message
    assert cluster(measured="b", exclude=("a", "c")).cluster.names == ("b",), (
        "what is left out needs no measurement"
    )
    site = cluster(measured="bc", skip_unmeasured=True)
    assert site.cluster.names == ("b", "c") and site.without_times == ("a",)
    with pytest.raises(FailedPreconditionError, match="b, a, c"):
        cluster(measured="", skip_unmeasured=True)
    away = (node("b"), node("a", connected=False), node("c", connected=False))
    assert cluster(nodes=away, measured="b").cluster.names == ("b",)


def test_a_starting_node_is_left_out_and_named(cluster: Any) -> None:
    nodes = (node("b"), node("a"), replace(node("c"), starting=True))
    site = cluster(nodes=nodes, measured="ab")
    assert site.cluster.names == ("b", "a") and site.starting == ("c",)
    assert cluster(nodes=nodes, exclude=("c",)).starting == ()
    with pytest.raises(UnavailableError) as refusal:
        cluster(nodes=nodes, source="c")
    assert (refusal.value.reason, refusal.value.field) == ("NODE_STARTING", "source")


def test_a_node_of_the_catalogue_is_estimated(cluster: Any) -> None:
    site = cluster(
        nodes=(node("b"), node("a", model="NVIDIA GeForce RTX 4090", free=20 * GB)), measured="b"
    )
    assert site.estimated == ("a",) and set(site.times) == {"b"}
    device = site.cluster.nodes[1].device
    assert device.bandwidth_bytes_per_s == CATALOGUE["rtx-4090"].bandwidth_bytes_per_s
    assert device.usable_bytes == 20 * GB, (
        "what the coordinator says is left, not what the data sheet has"
    )


def test_a_node_has_the_watts_of_its_sensor_else_of_the_catalogue(make_profile: Any) -> None:
    nodes = (
        node("a"),
        node("b", "NVIDIA GeForce RTX 4090"),
        node("c", "NVIDIA GeForce RTX 4090"),
        node("d"),
    )
    profiles = {NodeId(f"id-{name}"): make_profile(CONFIG, block_s=1e-2) for name in "abcd"}
    for name, energy in (
        ("a", EnergyProfile(9.0, 8.5, "rapl")),
        ("b", EnergyProfile(20.0, 260.0, "nvml")),
    ):
        profiles[NodeId(f"id-{name}")] = replace(profiles[NodeId(f"id-{name}")], energy=energy)
    site = site_cluster(nodes, (), profiles, model=MODEL, dtype=DType.BFLOAT16, source="a")
    costs = Costs(problem(site))
    assert power_of(costs, 0) == Power(9.0, 9.0, measured=True), (
        "a busy node takes no less than an idle one"
    )
    assert power_of(costs, 1) == Power(20.0, 260.0, measured=True)
    known = CATALOGUE["rtx-4090"]
    assert known.idle_w is not None and known.busy_w is not None
    assert power_of(costs, 2) == Power(known.idle_w, known.busy_w, measured=False)
    assert power_of(costs, 3) is None and without_power(costs) == ("d",)


def test_quantised_nodes_are_planned_by_profiles_of_that_and_on_processors_only(
    cluster: Any,
) -> None:
    with pytest.raises(FailedPreconditionError) as unknown:
        cluster(measured="b", quantisation=Quantisation.INT4)
    assert (
        "in int4 with bfloat16: a, c;" in unknown.value.message
        and "--quantise int4`" in unknown.value.message
    )
    gpu = node("a")
    gpu = replace(gpu, facts=replace(gpu.facts, kind="cuda"))
    with pytest.raises(InvalidArgumentError) as refused:
        cluster(nodes=(node("b"), gpu), quantisation=Quantisation.INT8)
    assert refused.value.field == "quantisation" and "not on a; exclude" in refused.value.message
    assert cluster(
        nodes=(node("b"), gpu), quantisation=Quantisation.INT8, exclude=("a",)
    ).cluster.names == ("b",)


def test_a_measured_node_is_not_taken_for_its_data_sheet(cluster: Any) -> None:
    site = cluster(nodes=(node("b", model="NVIDIA GeForce RTX 4090"),), measured="b")
    assert not site.estimated and set(site.times) == {"b"}


@pytest.mark.parametrize(
    ("name", "memory", "kind"),
    [
        ("NVIDIA GeForce RTX 3090", 24, "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 24, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA H200", 141, "h200"),
        ("Tesla P100-PCIE-16GB", 16, "p100"),
        ("Tesla P100-PCIE-12GB", 12, None),
        ("Tesla P100-SXM2-16GB", 16, None),
        ("Orin", 64, "agx-orin-64"),
        ("Orin", 32, "agx-orin"),
        ("Orin", 16, "orin-nx"),
        ("NVIDIA Jetson Orin Nano", 8, "orin-nano"),
        ("Raspberry Pi 5 Model B Rev 1.0", 8, "raspberry-pi-5"),
        ("Raspberry Pi 4 Model B Rev 1.4", 8, None),
        ("Intel(R) Xeon(R) Gold 6330", 256, None),
    ],
)
def test_devices_are_recognised_by_what_they_say(name: str, memory: int, kind: str | None) -> None:
    found = recognise(DeviceFacts("cuda", name, 8, memory * GB, memory * GB, True, "test"))
    assert (found.kind if found is not None else None) == kind


def test_where_no_link_was_measured_there_is_none(cluster: Any) -> None:
    """The source can hold too little by itself, so the plan has to leave it."""
    nodes = (node("b", free=6 * GB), node("a"), node("c"))
    measured = [item for item in LINKS if (item.sender, item.receiver) != ("id-b", "id-a")]
    site = cluster(nodes=nodes, links=measured)
    assert site.unmeasured == (("b", "a"),)
    result = plan(problem(site))
    assert result.feasible and [stage.node for stage in result.stages][:2] == ["b", "c"]
    # Only c can return to the source.
    only = [link("b", "a"), link("a", "c"), link("c", "b")]
    assert [stage.node for stage in plan(problem(cluster(nodes=nodes, links=only))).stages] == [
        "b",
        "a",
        "c",
    ]
    assert not plan(problem(cluster(nodes=nodes, links=[link("b", "a")]))).feasible


def test_a_source_that_cannot_be(cluster: Any) -> None:
    with pytest.raises(NotFoundError) as unknown:
        cluster(source="z")
    assert unknown.value.field == "source" and "a, b, c" in unknown.value.message
    with pytest.raises(UnavailableError) as away:
        cluster(nodes=(node("b", connected=False), node("a")))
    assert away.value.field == "source"
    assert cluster(source="id-a").cluster.source == "a", "an id names a node as well"
    namesakes = (node("b", connected=False, free=1), node("b"))
    assert cluster(nodes=namesakes).cluster.nodes[0].device.usable_bytes == 40 * GB


def test_every_stage_of_a_plan_has_layers(cluster: Any) -> None:
    """The way around the slow link is twice as fast, but a node without layers cannot be
    deployed."""
    slow = [
        link(sender, receiver, 1e6 if {sender, receiver} == {"b", "c"} else 1e9)
        for sender, receiver in permutations("abc", 2)
    ]
    made = problem(
        cluster(nodes=(node("b", free=6 * GB), node("a", free=10**8), node("c")), links=slow)
    )
    assert [len(stage.layers) > 0 for stage in plan(made).stages] == [True, True]


def test_kv_memory_is_that_of_the_longest_context(cluster: Any) -> None:
    site = cluster()
    short, long = problem(site), problem(site, context_tokens=4096)
    assert long.held_tokens == 4096 and short.held_tokens == 256
    kv = [Costs(item).sequence_kv_bytes() for item in (short, long)]
    assert kv[1] == [16 * size for size in kv[0]]
    with pytest.raises(InvalidArgumentError) as info:
        problem(site, context_tokens=200)
    assert info.value.field == "context_tokens"


def test_the_tensor_at_hand_is_counted_where_it_is(cluster: Any) -> None:
    """Loading takes the embedding once more in fp32 on the first stage and the head on the last, a
    block between."""
    made = problem(cluster())
    costs, plain = Costs(made), Costs(replace(made, loading_itemsize=None))
    cut = Cut((0, 1, 2), (10, 20, 32))
    outer, block = (
        n * LOADING_ITEMSIZE
        for n in (made.model.largest_outer_tensor, made.model.largest_block_tensor)
    )
    room = plain.decode(Load()).capacity_bytes - costs.decode(Load()).capacity_bytes
    more = [
        a - b
        for a, b in zip(
            stage_bytes(costs.decode(Load()), cut),
            stage_bytes(plain.decode(Load()), cut),
            strict=True,
        )
    ]
    assert [a + b for a, b in zip(room, more, strict=True)] == pytest.approx(
        [outer, block, outer], abs=100
    )
    assert [use.loading for use in costs.memory(Load(), cut)] == [outer, block, outer]
    alone = Cut((0,), (32,))
    both = stage_bytes(costs.decode(Load()), alone)[0] - stage_bytes(plain.decode(Load()), alone)[0]
    assert both + room[0] == pytest.approx(outer, abs=100), "one tensor at a time"


@pytest.mark.parametrize(("context", "step_tokens"), [(None, 512), (4096, 2048)])
def test_memory_has_room_for_the_largest_step_a_head_forms(
    cluster: Any, context: int | None, step_tokens: int
) -> None:
    """Not only for the prompts that time is planned for."""
    made = problem(cluster(), prompt_tokens=8, new_tokens=8, context_tokens=context)
    assert made.step_tokens == step_tokens
    whole_prompts = Costs(replace(made, step_tokens=None))
    assert Costs(made).stage_workspace(Load()) > whole_prompts.stage_workspace(Load())
    use = Costs(made).memory(Load(), Cut((0,), (made.model.layer_count,)))[0]
    assert use.workspace == Costs(made).stage_workspace(Load()) + Costs(made).logits_bytes(Load())
