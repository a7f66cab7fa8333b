"""Cluster descriptions: their meaning, and every wrong one refused by the name of its field."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.planning.costs.costs import Roofline
from edgeshard.planning.inputs.catalogue import CATALOGUE
from edgeshard.planning.inputs.devices import (
    parse_cluster,
    with_bandwidth,
    with_nodes,
    without_nodes,
)
from edgeshard.planning.inputs.problem import StepShape
from edgeshard.planning.inputs.shapes import (
    BUILT_IN_CONFIGS,
    ModelSpec,
    built_in_model,
    model_from_config,
)

ROOT = Path(__file__).resolve().parents[2]
NAN, INFINITY = float("nan"), float("inf")

GOOD: dict[str, Any] = {
    "source": "a",
    "device": [
        {"name": "a", "memory_bytes": 8e9, "bandwidth_bytes_per_s": 50e9, "flops": 1e12},
        {"name": "jetson", "kind": "orin-nx", "count": 2, "up_bps": 20e6},
    ],
    "link": [
        {"bandwidth_bps": 100e6, "latency_s": 0.001},
        {"from": "a", "to": "jetson", "bandwidth_bps": 10e6},
        {"between": ["jetson-1", "jetson-2"], "bandwidth_bps": 40e6},
    ],
    "model": {"dtype": "float16"},
    "workload": {"prompt_tokens": 7},
}


def test_a_cluster_says_what_it_means() -> None:
    cluster = parse_cluster(GOOD)
    a, first, second = cluster.nodes
    assert cluster.names == ("a", "jetson-1", "jetson-2")
    assert cluster.link(a, second).bandwidth_bps == 10e6, "a group's name stands for its nodes"
    assert cluster.link(second, a).bandwidth_bps == 20e6, (
        "only one direction was changed; the uplink caps the other"
    )
    assert cluster.link(second, a).latency_s == 0.001
    assert (
        cluster.link(first, second).bandwidth_bps
        == cluster.link(second, first).bandwidth_bps
        == 20e6
    )
    assert first.device == CATALOGUE["orin-nx"] and a.device.flops[DType.BFLOAT16] == 1e12
    assert cluster.dtype is DType.FLOAT16 and cluster.workload.prompt_tokens == 7


def test_overrides_keep_the_rest_and_say_where_figures_are_from() -> None:
    values = copy.deepcopy(GOOD)
    values["device"][1]["bandwidth_bytes_per_s"] = 90e9
    device = parse_cluster(values).nodes[1].device
    assert (
        device.bandwidth_bytes_per_s == 90e9
        and device.memory_bytes == CATALOGUE["orin-nx"].memory_bytes
    )
    assert "datasheet" in device.source and "bandwidth_bytes_per_s: cluster file" in device.source


def test_every_catalogue_entry_has_a_source_and_room() -> None:
    wanted = {
        "agx-orin",
        "orin-nx",
        "orin-nano",
        "rtx-3090",
        "rtx-4090",
        "h100",
        "h200",
        "raspberry-pi-5",
    }
    assert wanted <= set(CATALOGUE)
    assert any(kind.endswith("-cpu") for kind in CATALOGUE)
    for spec in CATALOGUE.values():
        assert (
            "datasheet" in spec.source and spec.usable_bytes > 0 and set(spec.flops) == set(DType)
        )


def changed(*path: Any, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    place = values
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("surce",), "a", "surce"),
        (("source",), ..., "source"),
        (("source",), "z", "source"),
        (("source",), 3, "source"),
        (("cloud",), "z", "cloud"),
        (("cloud",), "a", "cloud"),
        (("device",), ..., "device"),
        (("device",), {"name": "a"}, "device"),
        (("device", 0, "name"), "No Name", "device[0].name"),
        (("device", 0, "memory"), 1, "device[0].memory"),
        (("device", 0, "memory_bytes"), ..., "device[0].memory_bytes"),
        (("device", 0, "memory_bytes"), -1, "device[0].memory_bytes"),
        (("device", 0, "memory_bytes"), True, "device[0].memory_bytes"),
        (("device", 0, "flops"), NAN, "device[0].flops"),
        (("device", 0, "flops"), "fast", "device[0].flops"),
        (("device", 0, "bandwidth_bytes_per_s"), 0, "device[0].bandwidth_bytes_per_s"),
        (("device", 0, "bandwidth_bytes_per_s"), INFINITY, "device[0].bandwidth_bytes_per_s"),
        (("device", 0, "system_bytes"), 8e9, "device[0].system_bytes"),
        (("device", 0, "step_overhead_s"), -1.0, "device[0].step_overhead_s"),
        (("device", 0, "unified"), "yes", "device[0].unified"),
        (("device", 1, "kind"), "orin-mega", "device[1].kind"),
        (("device", 1, "count"), 0, "device[1].count"),
        (("device", 1, "count"), 2.5, "device[1].count"),
        (("device", 1, "count"), 10**9, "device[1].count"),
        (("device", 1, "name"), "a", "source"),
        (("device", 1, "up_bps"), 0, "device[1].up_bps"),
        (("link",), ..., "link"),
        (("link",), [], "link"),
        (("link", 0, "bandwidth_bps"), -5e6, "link[0].bandwidth_bps"),
        (("link", 0, "bandwidth_bps"), NAN, "link[0].bandwidth_bps"),
        (("link", 0, "latency_s"), -0.1, "link[0].latency_s"),
        (("link", 0, "speed"), 1, "link[0].speed"),
        (("link", 1, "to"), "z", "link[1].to"),
        (("link", 1, "to"), ..., "link[1].to"),
        (("link", 1, "between"), ["a", "jetson"], "link[1].between"),
        (("link", 2, "between"), ["a"], "link[2].between"),
        (("link", 2, "between"), ..., "link[2].between"),
        (("model", "dtype"), "int7", "model.dtype"),
        (("model", "layers"), 7, "model.layers"),
        (("workload", "prompt_tokens"), 0, "workload.prompt_tokens"),
        (("workload", "concurrency"), -1, "workload.concurrency"),
    ],
)
def test_what_is_wrong_is_refused_by_name(path: tuple[Any, ...], value: Any, field: str) -> None:
    values = changed(*path, value=value)
    if path == ("device", 1, "name"):
        del values["device"][1]["count"]  # two nodes of one name
        values["link"] = values["link"][:1]
        field = "device"
    with pytest.raises(InvalidArgumentError) as caught:
        parse_cluster(values)
    assert caught.value.field == field
    assert caught.value.exit_code == 2 and field in caught.value.message


def test_links_between_thousands_of_nodes_are_refused_before_they_are_made() -> None:
    values = copy.deepcopy(GOOD)
    values["device"][1] |= {"count": 500}
    values["link"] = [
        values["link"][0],
        *({"between": ["jetson", "jetson"], "bandwidth_bps": 1e6} for _ in range(2)),
    ]
    with pytest.raises(
        InvalidArgumentError, match="links to 1000000 pairs of nodes; at most 500000"
    ) as caught:
        parse_cluster(values)
    assert caught.value.field == "link[2].between"
    del values["link"][2]
    cluster = parse_cluster(values)
    assert len(cluster.links) == 500 * 499
    with pytest.raises(InvalidArgumentError) as caught:
        with_bandwidth(cluster, 5e6, ("jetson", "jetson"))
    assert caught.value.field == "sweep"


def test_what_if_changes() -> None:
    cluster = parse_cluster(GOOD)
    more = with_nodes(cluster, "jetson", 2, "what_if")
    assert (
        more.names[-2:] == ("jetson-new-1", "jetson-new-2")
        and more.nodes[-1].device == cluster.nodes[1].device
    )
    assert with_nodes(cluster, "h200", 1, "what_if").nodes[-1].device == CATALOGUE["h200"]
    assert without_nodes(cluster, "jetson-1", "what_if").names == ("a", "jetson-2")
    changes: list[Callable[[], object]] = [
        lambda: with_nodes(cluster, "z", 1, "what_if"),
        lambda: without_nodes(cluster, "a", "what_if"),
    ]
    for change in changes:
        with pytest.raises(InvalidArgumentError) as caught:
            change()
        assert caught.value.field == "what_if"
    a, first, _ = cluster.nodes
    assert with_bandwidth(cluster, 5e6, None).link(a, first).bandwidth_bps == 5e6
    one = with_bandwidth(cluster, 5e6, ("a", "jetson-1"))
    assert one.link(a, first).bandwidth_bps == one.link(first, a).bandwidth_bps == 5e6
    assert one.link(a, one.nodes[2]).bandwidth_bps == 10e6


def test_the_paper_testbed_is_the_papers() -> None:
    cluster = parse_cluster(
        tomllib.loads((ROOT / "deploy/examples/paper-testbed.toml").read_text())
    )
    kinds = [node.device.kind for node in cluster.nodes]
    assert (kinds.count("agx-orin"), kinds.count("orin-nx"), kinds.count("rtx-3090")) == (12, 2, 1)
    by_name = {node.name: node for node in cluster.nodes}
    source, cloud = by_name[cluster.source], by_name[cluster.cloud or ""]
    slow = [
        (s.name, r.name)
        for s in cluster.nodes
        for r in cluster.nodes
        if s is not r and cluster.link(s, r).bandwidth_bps != 50e6
    ]
    assert sorted(slow) == sorted([(source.name, cloud.name), (cloud.name, source.name)])
    assert cluster.link(source, cloud).bandwidth_bps == 1e6
    usable = {node.device.kind: node.device.usable_bytes for node in cluster.nodes}
    assert usable == {"agx-orin": 29e9, "orin-nx": 13e9, "rtx-3090": 22e9}


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("llama2-7b", 6_738_415_616, 32),
        ("llama2-13b", 13_015_864_320, 40),
        ("llama2-70b", 68_976_648_192, 80),
    ],
)
def test_built_in_models_have_the_published_sizes(name: str, parameters: int, layers: int) -> None:
    model = built_in_model(name)
    assert model is not None and model.parameter_count == parameters and model.layer_count == layers


def test_a_tied_embedding_is_counted_once_in_the_model_and_twice_in_its_ends() -> None:
    config = BUILT_IN_CONFIGS["llama2-7b"] | {"tie_word_embeddings": True}
    tied, free = model_from_config("tied", config), built_in_model("llama2-7b")
    assert free is not None
    assert tied.tied_parameters == 32_000 * 4096
    assert tied.parameter_count == free.parameter_count - tied.tied_parameters
    assert (tied.embedding_parameters, tied.head_parameters) == (
        free.embedding_parameters,
        free.head_parameters,
    )


MIXTRAL = BUILT_IN_CONFIGS["llama2-7b"] | {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_mixture_reads_the_experts_its_tokens_choose() -> None:
    block = model_from_config("mixtral", MIXTRAL).blocks[0]
    expert = 3 * 4096 * 14_336
    assert block.expert_parameters == 8 * expert
    assert block.read_bytes(1, DType.BFLOAT16) == pytest.approx(2 * (block.parameters - 6 * expert))
    assert block.active_parameters == pytest.approx(block.parameters - 6 * expert)
    assert block.read_bytes(2, DType.BFLOAT16) == pytest.approx(
        2 * (block.parameters - 8 * expert * 0.75**2)
    )
    assert block.read_bytes(1000, DType.BFLOAT16) == pytest.approx(2 * block.parameters)
    assert block.read_bytes(1000, DType.BFLOAT16, Quantisation.INT8) == block.weight_bytes(
        DType.BFLOAT16, Quantisation.INT8
    )
    missed = 6 * expert * (1 + 2 / 64)
    every = block.weight_bytes(DType.BFLOAT16, Quantisation.INT8)
    assert block.read_bytes(1, DType.BFLOAT16, Quantisation.INT8) == pytest.approx(every - missed)


def test_a_window_bounds_what_decoding_reads_and_not_what_is_kept() -> None:
    full, sliding = (
        model_from_config(
            "m", BUILT_IN_CONFIGS["llama2-7b"] | {"model_type": "mistral", "sliding_window": window}
        )
        for window in (None, 512)
    )
    assert {block.window for block in sliding.blocks} == {512}
    assert {block.kv for block in sliding.blocks} == {block.kv for block in full.blocks}
    device = CATALOGUE["orin-nx"]

    def seconds(model: ModelSpec, context: int) -> float:
        times = Roofline(
            device, model, DType.FLOAT16, None, KvFormat.FLOAT16, device.flops[DType.FLOAT16]
        )
        return times.block_s(model.blocks[0], StepShape(1, 1, context, context))

    assert seconds(sliding, 400) == seconds(full, 400)
    assert seconds(sliding, 3000) == pytest.approx(seconds(full, 512))
    assert seconds(full, 3000) > 1.05 * seconds(full, 512)


def test_a_windowed_prompt_sees_as_many_keys_as_are_counted_one_by_one() -> None:
    tokens = 100
    before = 30
    window = 50
    seen = [min(before + position, window) for position in range(1, tokens + 1)]
    whole = StepShape(1, tokens, before + (tokens + 1) / 2, before + tokens)
    bounded = whole.within(window)
    assert bounded.context == pytest.approx(sum(seen) / tokens)
    # The first query still sees all that were there before it.
    assert bounded.kv_tokens == 130
    assert StepShape(1, 10, 95.5, 100).within(window).kv_tokens == 59
    assert whole.within(0) is whole and whole.within(130) is whole


@pytest.mark.parametrize(
    "key", ["model_type", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"]
)
def test_a_config_without_a_needed_key_is_refused_by_its_name(key: str) -> None:
    config = {name: value for name, value in BUILT_IN_CONFIGS["llama2-7b"].items() if name != key}
    with pytest.raises(UnsupportedModelError) as caught:
        model_from_config("m", config)
    assert caught.value.field == key and caught.value.exit_code == 2
