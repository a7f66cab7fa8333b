"""Plans: their costs, the invariants of every plan, and the message if there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import FRAME_OVERHEAD_BYTES, Costs, Load, frame_bytes
from edgeshard.planning.inputs.devices import Cluster, parse_cluster, with_bandwidth, with_nodes
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import (
    BUILT_IN_CONFIGS,
    ModelSpec,
    built_in_model,
    model_from_config,
)
from edgeshard.planning.inputs.workspace import SLACK_BYTES
from edgeshard.planning.report.baselines import cloud_of, compare, cut_of, even
from edgeshard.planning.report.explain import bottleneck, explain
from edgeshard.planning.search.load_search import loads
from edgeshard.planning.search.plan import PlanResult, plan, predict
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import score, stage_bytes, violations
from tests.planning.oracles.brute_plans import best_rate

ROOT = Path(__file__).resolve().parents[2]
SMALL_CONFIG = BUILT_IN_CONFIGS["llama2-7b"] | {"num_hidden_layers": 8, "vocab_size": 2000}
SMALL = model_from_config("small", SMALL_CONFIG)
LAYER = 4 * SMALL.blocks[0].parameters


def llama(name: str = "llama2-7b") -> ModelSpec:
    model = built_in_model(name)
    assert model is not None
    return model


def device(name: str, layers: float, speed: float = 100e9, **more: Any) -> dict[str, Any]:
    """A node with room for `layers` fp32 layers of the small model besides everything else a stage
    needs."""
    room = layers * LAYER + 0.6e9
    return {
        "name": name,
        "memory_bytes": room,
        "bandwidth_bytes_per_s": speed,
        "flops": 10e12,
        **more,
    }


def cluster_of(
    *devices: dict[str, Any], bandwidth_bps: float = 100e6, latency_s: float = 0.0
) -> Cluster:
    link = {"bandwidth_bps": bandwidth_bps, "latency_s": latency_s}
    return parse_cluster({"source": devices[0]["name"], "device": list(devices), "link": link})


def problem_of(cluster: Cluster, **more: Any) -> PlanProblem:
    values: dict[str, Any] = {
        "prompt_tokens": 32,
        "new_tokens": 32,
        "dtype": DType.FLOAT32,
        "model": SMALL,
    } | more
    return PlanProblem(cluster=cluster, **values)


def check_plan(result: PlanResult) -> None:
    """The invariants of every plan, computed from the model and the nodes instead of the
    instance."""
    problem = result.problem
    assert result.prediction is not None
    load = result.prediction.load
    model = problem.model
    item = problem.dtype.itemsize
    by_name = {node.name: node for node in problem.cluster.nodes}
    assert result.stages[0].node == problem.cluster.source
    assert len({stage.node for stage in result.stages}) == len(result.stages)
    done = 0
    for index, stage in enumerate(result.stages):
        assert stage.layers.first == done
        done = stage.layers.end
        weights = sum(
            block.parameters for block in model.blocks[stage.layers.first : stage.layers.end]
        )
        weights += model.embedding_parameters * (index == 0) + model.head_parameters * (
            done == model.layer_count
        )
        tokens = load.batch * load.micro_batches * (problem.prompt_tokens + problem.new_tokens)
        kv = tokens * 2 * len(stage.layers) * model.shape.kv_heads * model.shape.head_dim * item
        assert stage.memory.weights == weights * item and stage.memory.kv >= kv
        assert weights * item + kv + SLACK_BYTES <= by_name[stage.node].device.usable_bytes
        assert stage.memory.needed <= stage.memory.usable <= by_name[stage.node].device.usable_bytes
    assert done == model.layer_count
    assert result.gap is not None and 0 <= result.gap < 1


# Costs


def test_decoding_is_reading_the_layers_or_computing_them() -> None:
    cluster = cluster_of(device("a", 20, speed=100e9) | {"flops": 1e12})
    costs = Costs(problem_of(cluster, new_tokens=32))
    one = costs.decode(Load())
    kv_read = (32 + 16) * SMALL.blocks[0].kv.bytes_per_token(DType.FLOAT32)
    assert one.compute_s[0, 3] == pytest.approx((LAYER + kv_read) / 100e9)
    assert one.head_s[0] == pytest.approx(4 * SMALL.head_parameters / 100e9)
    # 64 sequences need 64 times the operations but the weights only once: now computing binds.
    many = costs.decode(Load(64))
    operations = 64 * (2 * SMALL.blocks[0].parameters + 4 * (32 + 16) * 4096)
    assert many.compute_s[0, 3] == pytest.approx(operations / 1e12)
    assert many.head_s[0] == pytest.approx(
        max(one.head_s[0], 2 * 64 * SMALL.head_parameters / 1e12)
    )


def test_frames_have_a_cost_of_their_own_and_the_source_may_keep_the_head() -> None:
    cluster = cluster_of(device("a", 20), device("b", 20), bandwidth_bps=8e6, latency_s=0.25)
    costs = Costs(problem_of(cluster))
    decode, prefill = costs.decode(Load(2)), costs.prefill(Load(2))
    assert decode.hop_s[0, 1] == pytest.approx((2 * 4096 * 4 + FRAME_OVERHEAD_BYTES) / 1e6)
    assert prefill.hop_s[0, 1] == pytest.approx(frame_bytes(2 * 32 * 4096 * 4) / 1e6)
    assert frame_bytes(3 << 20) == (3 << 20) + 3 * FRAME_OVERHEAD_BYTES
    assert decode.return_s[1, 0] < 0.001 < decode.hop_s[1, 0]
    assert decode.latency_s[0, 1] == 0.25 and decode.latency_s[1, 1] == 0
    hidden = Costs(problem_of(cluster, head_on_source=True)).decode(Load(2))
    assert hidden.return_s[1, 0] == pytest.approx(decode.hop_s[1, 0]), (
        "hidden states come back, not tokens"
    )


def test_memory_is_the_same_in_the_instance_and_in_its_parts() -> None:
    model = model_from_config("tied", SMALL_CONFIG | {"tie_word_embeddings": True})
    cluster = cluster_of(device("a", 20), device("b", 20))
    for head_on_source in (False, True):
        costs = Costs(problem_of(cluster, model=model, head_on_source=head_on_source))
        for load in (Load(), Load(3, 2)):
            for cut in (Cut((0,), (8,)), Cut((0, 1), (3, 8))):
                parts = costs.memory(load, cut)
                counted = [use.needed - use.loading for use in parts]
                assert counted == pytest.approx(list(stage_bytes(costs.decode(load), cut)))
                assert parts[0].kv == load.requests * 64 * 2 * cut.ends[0] * 4096 * 4


def test_the_formula_of_two_phases() -> None:
    cluster = cluster_of(device("a", 20), device("b", 20))
    costs, load = Costs(problem_of(cluster)), Load(2, 3)
    prediction = predict(costs, load, Cut((0, 1), (4, 8)))
    prefill = score(costs.prefill(load), prediction.cut)
    decode = score(costs.decode(load), prediction.cut)
    per_token = max(decode.round_s, 3 * decode.bottleneck_s)
    total = prefill.round_s + 2 * prefill.bottleneck_s + 31 * per_token
    assert prediction.time_per_token_s == pytest.approx(per_token)
    assert prediction.throughput_tps == pytest.approx(6 * 32 / total)
    assert prediction.ttft_s == pytest.approx(prefill.round_s + 2 * prefill.bottleneck_s)


def test_a_measured_node_is_taken_as_measured() -> None:
    class Measured:
        def block_s(self, block: Any, phase: Any) -> float:
            return 0.001 * float(phase.tokens)

        def embedding_s(self, phase: Any) -> float:
            return 0.01

        def head_s(self, phase: Any) -> float:
            return 0.02

        def step_s(self, hidden_bytes: float) -> float:
            return 0.5

    result = plan(problem_of(cluster_of(device("a", 20)), times={"a": Measured()}))
    assert result.prediction is not None
    assert result.prediction.time_per_token_s == pytest.approx(8 * 0.001 + 0.53)
    assert result.prediction.ttft_s == pytest.approx(8 * 0.032 + 0.53)
    assert not any("Not measured" in line for line in explain(result))


# Objectives


def brute(problem: PlanProblem, load: Load) -> float:
    """The least max(R, m B) over every cut on up to 3 nodes."""
    import itertools

    costs = Costs(problem)
    instance, layers = costs.decode(load), problem.model.layer_count
    best = float("inf")
    for count in range(1, len(costs.nodes) + 1):
        for rest in itertools.permutations(
            [i for i in range(len(costs.nodes)) if i != costs.source], count - 1
        ):
            for ends in itertools.combinations(range(1, layers), count - 1):
                cut = Cut((costs.source, *rest), (*ends, layers))
                if not violations(instance, cut):
                    found = score(instance, cut)
                    best = min(best, max(found.round_s, load.micro_batches * found.bottleneck_s))
    return best


@settings(max_examples=25, deadline=None)
@given(
    layers=st.tuples(*[st.floats(1.2, 9.0)] * 3),
    speeds=st.tuples(*[st.sampled_from([20e9, 100e9, 800e9])] * 3),
    rate=st.sampled_from([1e6, 20e6, 1e9]),
    latency=st.sampled_from([0.0, 0.01]),
)
def test_properties_of_latency_plans(
    layers: tuple[float, ...], speeds: tuple[float, ...], rate: float, latency: float
) -> None:
    nodes = [
        device(name, room, speed) for name, room, speed in zip("abc", layers, speeds, strict=True)
    ]
    cluster = cluster_of(*nodes, bandwidth_bps=rate, latency_s=latency)
    problem = problem_of(cluster)
    result = plan(problem)
    expected = brute(problem, Load())
    if result.prediction is None:
        assert expected == float("inf")
        assert result.shortage is not None and result.shortage.amount > 0
        return
    check_plan(result)
    found = result.prediction.time_per_token_s
    assert found == pytest.approx(expected)
    # Another order of the nodes changes nothing; more bandwidth or another node never hurts.
    swapped = plan(replace(problem, cluster=replace(cluster, nodes=cluster.nodes[::-1])))
    faster = plan(replace(problem, cluster=with_bandwidth(cluster, 2 * rate, None)))
    wider = plan(replace(problem, cluster=with_nodes(cluster, "b", 1, "what_if")))
    for other in (swapped, faster, wider):
        assert other.prediction is not None
        assert other.prediction.time_per_token_s <= found * (1 + 1e-9)
    assert swapped.prediction is not None and swapped.prediction.time_per_token_s == pytest.approx(
        found
    )


@settings(max_examples=15, deadline=None)
@given(
    layers=st.tuples(*[st.floats(2.5, 9.0)] * 3),
    speeds=st.tuples(*[st.sampled_from([20e9, 100e9, 800e9])] * 3),
    rate=st.sampled_from([5e6, 100e6]),
    concurrency=st.integers(1, 9),
)
def test_properties_of_auto_plans(
    layers: tuple[float, ...], speeds: tuple[float, ...], rate: float, concurrency: int
) -> None:
    nodes = [
        device(name, room, speed) for name, room, speed in zip("abc", layers, speeds, strict=True)
    ]
    problem = problem_of(
        cluster_of(*nodes, bandwidth_bps=rate),
        objective=Objective.AUTO,
        concurrency=concurrency,
        batch=4,
    )
    result = plan(problem)
    if result.prediction is None:
        assert all(brute(problem, load) == float("inf") for load in loads(Costs(problem)))
        return
    check_plan(result)
    load = result.prediction.load
    assert load.requests <= concurrency and load.batch <= 4
    if concurrency == 1:
        assert load.requests / result.prediction.time_per_token_s == pytest.approx(
            1 / brute(problem, Load())
        )
    else:
        assert result.gap == 0 and result.prediction.throughput_tps == pytest.approx(
            best_rate(problem).tokens_per_s
        )
    limit = result.prediction.time_per_token_s * 0.999
    slower = plan(replace(problem, max_time_per_token_s=limit))
    if slower.prediction is None:
        assert slower.shortage is not None and slower.shortage.constraint == "max_time_per_token"
    else:
        assert slower.prediction.time_per_token_s <= limit


def test_auto_alone_is_request_and_more_requests_give_more() -> None:
    cluster = cluster_of(device("a", 6), device("b", 6), device("c", 6))
    latency = plan(problem_of(cluster, objective=Objective.REQUEST))
    alone = plan(problem_of(cluster, objective=Objective.AUTO))
    assert alone.placement == latency.placement and alone.prediction == latency.prediction
    many = plan(problem_of(cluster, objective=Objective.AUTO, concurrency=8))
    free = plan(problem_of(cluster, objective=Objective.THROUGHPUT))
    assert alone.prediction and many.prediction and free.prediction
    assert (
        alone.prediction.throughput_tps
        < many.prediction.throughput_tps
        <= free.prediction.throughput_tps
    )
    assert many.prediction.load.requests <= 8 < free.prediction.load.requests


def test_prompts_count_in_the_choice_of_a_throughput_plan() -> None:
    """With long prompts the plan is at least as good as the one that looks at decoding only."""
    slow_maths = device("b", 6, speed=800e9) | {"flops": 0.3e12}
    cluster = cluster_of(device("a", 6), slow_maths, device("c", 6), bandwidth_bps=1e9)
    problem = problem_of(
        cluster, objective=Objective.AUTO, concurrency=4, prompt_tokens=1024, new_tokens=8
    )
    result = plan(problem)
    costs = Costs(problem)
    assert result.prediction is not None
    for load in loads(costs):
        for ends in ((2, 4), (3, 6), (1, 7), (4, 6)):
            for rest in ((1, 2), (2, 1)):
                cut = Cut((0, *rest), (*ends, 8))
                if not violations(costs.decode(load), cut):
                    assert (
                        predict(costs, load, cut).throughput_tps
                        <= result.prediction.throughput_tps * 1.02
                    )


def test_limits_are_kept() -> None:
    cluster = cluster_of(
        device("a", 9, 50e9), device("b", 9, 800e9), device("c", 9, 400e9), bandwidth_bps=1e9
    )
    free = plan(problem_of(cluster))
    assert "b=" in free.placement and "c=" not in free.placement
    assert "b=" not in plan(problem_of(cluster, exclude=("b",))).placement
    assert "b=" not in plan(problem_of(cluster, reserve={"b": 100e9})).placement
    shared = plan(problem_of(cluster, max_share={"b": 0.5}))
    assert all(len(stage.layers) <= 4 for stage in shared.stages if stage.node == "b")
    assert len(plan(problem_of(cluster, min_nodes=3)).stages) == 3
    assert plan(problem_of(cluster, max_nodes=1)).placement == "a=0:8"
    hidden = plan(problem_of(cluster, head_on_source=True))
    assert hidden.stages[0].memory.weights > free.stages[0].memory.weights
    assert hidden.stages[-1].memory.weights < free.stages[-1].memory.weights


def test_runner_ups_are_worse_distinct_and_not_the_same_plan_with_equal_nodes() -> None:
    cluster = cluster_of(device("a", 4), device("b", 9, 400e9, count=2), device("c", 9, 200e9))
    result = plan(problem_of(cluster))
    assert result.prediction is not None and result.alternatives
    placements = [result.placement, *(item.placement for item in result.alternatives)]
    assert len(set(placements)) == len(placements)
    assert not any(p == result.placement.replace("b-1", "b-2") for p in placements[1:])
    times = [item.time_per_token_s for item in result.alternatives]
    assert times == sorted(times) and times[0] >= result.prediction.time_per_token_s


# No plan


def test_memory_short_says_how_much_and_what_would_do() -> None:
    cluster = cluster_of(device("a", 3), device("b", 2))
    result = plan(problem_of(cluster))
    assert result.shortage is not None and result.shortage.constraint == "memory"
    text = result.shortage.text
    assert bottleneck(result) == text and "GiB short" in text and "find no room" in text
    words = text.partition("one more ")[2].split()
    # The remedy it names works; half of it does not.
    size = float(words[0]) * 1e9
    for factor, fits in ((1.0, True), (0.25, False)):
        more = {
            "name": "new",
            "memory_bytes": size * factor,
            "bandwidth_bytes_per_s": 1e11,
            "flops": 1e12,
        }
        more["system_bytes"] = 3e9 * factor
        devices = [device("a", 3), device("b", 2), more]
        assert plan(problem_of(cluster_of(*devices))).feasible is fits
    assert "bfloat16 would fit" in text
    assert plan(problem_of(cluster, dtype=DType.BFLOAT16)).feasible


def test_memory_short_of_layers_that_differ_is_theirs() -> None:
    config = {
        "model_type": "nemotron_h",
        "hidden_size": 1024,
        "hybrid_override_pattern": "MEM*EMEMEME" * 2,
    }
    config |= {
        "n_routed_experts": 64,
        "moe_intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 1024,
    }
    model = model_from_config(
        "unlike", config | {"vocab_size": 4096, "max_position_embeddings": 1024}
    )
    sizes = [block.weight_bytes(DType.FLOAT32) for block in model.blocks]
    assert max(sizes) > 4 * min(sizes)
    nodes = [
        {
            "name": name,
            "memory_bytes": 2e9 + sum(sizes) / 3,
            "bandwidth_bytes_per_s": 1e11,
            "flops": 1e12,
        }
        for name in "ab"
    ]
    nodes = [node | {"system_bytes": 1e9} for node in nodes]
    result = plan(problem_of(cluster_of(*nodes), model=model))
    assert result.shortage is not None and result.shortage.constraint == "memory"
    text = result.shortage.text
    assert result.shortage.amount < sum(sizes) / 2, text
    new = nodes[0] | {
        "name": "new",
        "memory_bytes": float(text.partition("one more ")[2].split()[0]) * 1e9,
        "system_bytes": 3e9,
    }
    assert plan(problem_of(cluster_of(*nodes, new), model=model)).feasible


@pytest.mark.parametrize(
    ("more", "constraint", "words"),
    [
        ({"max_nodes": 2}, "max_nodes", "max_nodes is 2, but the model needs 3; allow 1 more"),
        ({"min_nodes": 5}, "min_nodes", "only 3 nodes can take part"),
        ({"max_share": {"b": 0.125, "c": 0.125}}, "max_share", "max_share leaves no node for"),
        ({"reserve": {"a": 100e9}}, "source_memory", "source a is"),
        ({"exclude": ("b", "c")}, "memory", "short"),
        ({"max_time_per_token_s": 1e-6}, "max_time_per_token", "above max_time_per_token"),
    ],
)
@pytest.mark.parametrize("objective", list(Objective))
def test_the_constraint_that_is_short_is_named(
    more: dict[str, Any], constraint: str, words: str, objective: Objective
) -> None:
    watts = {"idle_w": 5, "busy_w": 50}
    cluster = cluster_of(
        device("a", 3, **watts), device("b", 3, **watts), device("c", 3.9, **watts)
    )
    assert plan(problem_of(cluster, objective=objective, concurrency=2)).feasible
    result = plan(problem_of(cluster, objective=objective, concurrency=2, **more))
    assert not result.feasible and result.stages == () and result.placement == ""
    assert result.shortage is not None and result.shortage.constraint == constraint
    assert words in result.shortage.text and result.shortage.amount > 0
    assert words in explain(result)[-1]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"new_tokens": -1}, "new_tokens"),
        ({"prompt_tokens": 5000}, "prompt_tokens"),
        ({"batch": 0}, "batch"),
        ({"concurrency": 0}, "concurrency"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"min_nodes": 3, "max_nodes": 2}, "max_nodes"),
        ({"max_time_per_token_s": float("nan")}, "max_time_per_token_s"),
        ({"max_time_per_token_s": -1.0}, "max_time_per_token_s"),
        ({"exclude": ("z",)}, "exclude"),
        ({"exclude": ("a",)}, "exclude"),
        ({"reserve": {"z": 1.0}}, "reserve"),
        ({"reserve": {"a": -1.0}}, "reserve.a"),
        ({"max_share": {"b": 0.0}}, "max_share.b"),
        ({"max_share": {"b": 1.5}}, "max_share.b"),
    ],
)
def test_a_problem_that_cannot_be_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(problem_of(cluster_of(device("a", 3), device("b", 9)), **more))
    assert caught.value.field == field


# Baselines


def test_baselines_cut_as_they_say() -> None:
    assert cut_of(even([3, 1, 2], 8)) == Cut((3, 1, 2), (3, 6, 8))
    assert cut_of(even([0, 1, 2, 3], 2)) == Cut((0, 1), (1, 2))
    cluster = cluster_of(device("a", 8), device("b", 9, 200e9), device("c", 4, 400e9))
    costs = Costs(problem_of(cluster))
    assert cloud_of(costs) == 2, "the fastest memory"
    assert cloud_of(Costs(problem_of(replace(cluster, cloud="b")))) == 1
    rows = {row.strategy: row for row in compare(problem_of(cluster))}
    assert rows["edge-solo"].placement == "a=0:8"
    assert rows["cloud-edge-even"].placement == "a=0:4,c=4:8"
    best = rows["edgeshard"]
    for row in rows.values():
        if row.feasible:
            assert (
                row.time_per_token_s is not None
                and best.time_per_token_s is not None
                and row.gap is not None
            )
            assert row.time_per_token_s >= best.time_per_token_s * (1 - 1e-9)
            # If the plan's gap is 0, a strategy's gap is exactly its loss.
            assert row.gap == pytest.approx(
                1 - best.time_per_token_s / row.time_per_token_s, abs=1e-9
            )
        else:
            assert row.reason and row.placement == "" and row.time_per_token_s is None


def test_memory_proportional_follows_memory_and_fills_when_that_overfills() -> None:
    rows = {
        row.strategy: row
        for row in compare(problem_of(cluster_of(device("a", 10), device("b", 10))))
    }
    assert rows["memory-proportional"].placement == "a=0:4,b=4:8"
    tight = {
        row.strategy: row
        for row in compare(problem_of(cluster_of(device("a", 1.5), device("b", 7.4))))
    }
    assert tight["memory-proportional"].placement == "a=0:1,b=1:8"
    alone = {row.strategy: row for row in compare(problem_of(cluster_of(device("a", 10))))}
    assert "no second node" in alone["cloud-edge-opt"].reason and alone["edgeshard"].feasible
