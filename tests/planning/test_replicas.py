"""The model whole on one node or on several: rates, shares and limits against other ways of
counting, and the words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.devices import Cluster, Link, parse_cluster, with_nodes
from edgeshard.planning.inputs.problem import Objective, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, BlockSpec, model_from_config
from edgeshard.planning.report.baselines import COMPARED, StrategyRow, compare
from edgeshard.planning.report.verdict import MOST_ADVISED, MOST_TRIED, advice, plan_wins, verdict
from edgeshard.planning.search.plan import plan
from edgeshard.planning.search.rate_search import MOST_COUNTED
from edgeshard.planning.search.replicas import ReplicaPlan, replicas, shared_out, whole_fastest
from edgeshard.planning.solvers.all_cuts import count_cuts

SMALL_CONFIG = BUILT_IN_CONFIGS["llama2-7b"] | {"num_hidden_layers": 8, "vocab_size": 2000}
SMALL = model_from_config("small", SMALL_CONFIG)
LAYER = 4 * SMALL.blocks[0].parameters
SEQUENCE_KV = 8 * 64 * 2 * 4096 * 4
"""Bytes of a request of 64 tokens in all 8 blocks, keys and values of 4,096 floats."""


def device(name: str, layers: float, speed: float = 100e9, **more: Any) -> dict[str, Any]:
    """A node with room for `layers` fp32 layers besides everything else a stage needs."""
    values = {
        "memory_bytes": layers * LAYER + 0.6e9,
        "bandwidth_bytes_per_s": speed,
        "flops": 10e12,
    }
    return {"name": name, **values, **more}


def cluster_of(*devices: dict[str, Any], bandwidth_bps: float = 1e9) -> Cluster:
    link = {"bandwidth_bps": bandwidth_bps, "latency_s": 0.0}
    return parse_cluster({"source": devices[0]["name"], "device": list(devices), "link": link})


def problem_of(cluster: Cluster, **more: Any) -> PlanProblem:
    values: dict[str, Any] = {
        "model": SMALL,
        "objective": Objective.THROUGHPUT,
        "dtype": DType.FLOAT32,
    }
    return PlanProblem(cluster=cluster, **values | {"prompt_tokens": 32, "new_tokens": 32} | more)


def rate_alone(problem: PlanProblem, spec: dict[str, Any], requests: int | None) -> float:
    """The rate of a plan for only this node; 0 if there is none."""
    found = plan(replace(problem, cluster=cluster_of(spec), concurrency=requests), alternatives=0)
    return 0.0 if found.prediction is None else found.prediction.throughput_tps


def shares(found: ReplicaPlan) -> dict[str, int]:
    return {item.node: item.requests for item in found.replicas}


def rows_of(problem: PlanProblem) -> dict[str, StrategyRow]:
    rows = {row.strategy: row for row in compare(problem)}
    assert tuple(rows) == COMPARED
    return rows


# Figures


def test_four_requests_on_each_of_two_equal_nodes_beat_eight_over_both() -> None:
    problem = problem_of(cluster_of(device("a", 12), device("b", 12)), concurrency=8)
    rows = rows_of(problem)
    row, planned = rows["replicas"], rows["edgeshard"]
    assert row.placement == "a=0:8 x4 | b=0:8 x4" and row.nodes == 2
    assert row.throughput_tps is not None and planned.throughput_tps is not None
    assert row.throughput_tps > planned.throughput_tps
    assert row.gap == 0, "no pipeline is better"


def test_a_node_alone_takes_as_long_as_reading_its_weights_and_caches() -> None:
    problem = problem_of(cluster_of(device("a", 12)), concurrency=3)
    row = rows_of(problem)["replicas"]
    block = 4 * SMALL.blocks[0].parameters
    head = 4 * SMALL.head_parameters
    embedding_row = 2 * 4096 * 4
    kv = 3 * 48 * 2 * 4096 * 4
    step_s = (8 * (block + kv) + head + 3 * embedding_row) / 100e9
    assert row.time_per_token_s == pytest.approx(step_s, rel=1e-6)
    flops = 3 * 32 * 2 * SMALL.blocks[0].parameters + SMALL.attention_flops(
        SMALL.blocks[0], 96, 16.5
    )
    prompt_kv = 3 * 32 * 2 * 4096 * 4
    prompt_s = (
        8 * max(flops / 10e12, (block + prompt_kv) / 100e9) + (head + 96 * embedding_row) / 100e9
    )
    assert row.ttft_s == pytest.approx(prompt_s, rel=1e-6)
    assert row.throughput_tps == pytest.approx(3 * 32 / (prompt_s + 31 * step_s), rel=1e-6)


NODE = st.tuples(st.floats(6, 14), st.floats(30e9, 900e9), st.sampled_from([0.3e12, 2e12, 10e12]))


@settings(max_examples=25, deadline=None)
@given(st.lists(NODE, min_size=2, max_size=3), st.integers(1, 12), st.sampled_from([None, 3, 12]))
def test_requests_are_shared_out_as_counting_all_splits_says(
    nodes: list[tuple[float, float, float]], requests: int, batch: int | None
) -> None:
    specs = [
        device(name, room, speed, flops=flops)
        for name, (room, speed, flops) in zip("abc", nodes, strict=False)
    ]
    problem = problem_of(cluster_of(*specs), concurrency=requests, batch=batch)
    alone = [
        [0.0, *(rate_alone(problem, spec, k) for k in range(1, requests + 1))] for spec in specs
    ]
    splits = (
        split for split in product(range(requests + 1), repeat=len(specs)) if sum(split) <= requests
    )
    best = max(sum(rates[k] for rates, k in zip(alone, split, strict=True)) for split in splits)
    found = replicas(problem)
    assert found.throughput_tps == pytest.approx(best, rel=1e-9)
    assert sum(shares(found).values()) <= requests
    for item in found.replicas:
        assert alone["abc".index(item.node)][item.requests] == pytest.approx(
            item.prediction.throughput_tps, rel=1e-9
        )
    if found.replicas:
        assert found.ttft_s == max(item.prediction.ttft_s for item in found.replicas)
        assert found.time_per_token_s == max(
            item.prediction.time_per_token_s for item in found.replicas
        )
    assert {node.node for node in found.left_out} == {
        spec["name"] for spec, rates in zip(specs, alone, strict=True) if rates[1] == 0
    }


RISING = st.lists(st.integers(0, 20), min_size=1, max_size=5).map(
    lambda steps: [sum(steps[: i + 1]) for i in range(len(steps))]
)


@given(st.lists(RISING, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 4))
def test_any_rising_rates_are_shared_out_best(
    rates: list[list[int]], requests: int, most_nodes: int
) -> None:
    def total(split: Sequence[int]) -> int:
        return sum(own[min(k, len(own)) - 1] for own, k in zip(rates, split, strict=True) if k)

    for nodes in (None, most_nodes):
        split = shared_out(rates, requests, nodes)
        every = product(range(6), repeat=len(rates))
        fitting = [
            s for s in every if sum(s) <= requests and (nodes is None or sum(map(bool, s)) <= nodes)
        ]
        assert split in [list(s) for s in fitting]
        assert total(split) == max(map(total, fitting))
    assert shared_out(rates, None) == [len(own) for own in rates]


def test_without_a_limit_of_requests_each_node_takes_what_its_memory_holds() -> None:
    small = device("b", 8.0)
    # Room for the model and two requests, not for three.
    alone = Costs(problem_of(cluster_of(small)))
    need = alone.decode(Load(2))
    small["memory_bytes"] = (
        float(need.layer_bytes.sum()) + need.stage_bytes + need.embed_bytes + need.head_bytes
    )
    small["memory_bytes"] += alone.loading_bytes(alone.nodes[0]) + SEQUENCE_KV // 2
    found = replicas(problem_of(cluster_of(device("a", 14), small)))
    assert shares(found) == {"a": 8, "b": 2}
    assert shares(replicas(problem_of(cluster_of(device("a", 14), small), batch=12))) == {
        "a": 12,
        "b": 2,
    }


@pytest.mark.parametrize(
    "objective", [Objective.REQUEST, Objective.TTFT, Objective.LATENCY, Objective.AUTO]
)
def test_one_request_goes_to_the_node_that_is_best_for_the_objective(objective: Objective) -> None:
    # b reads faster, c computes faster.
    specs = [
        device("a", 12),
        device("b", 12, 400e9, flops=1e12),
        device("c", 12, 200e9, flops=40e12),
    ]
    problem = problem_of(cluster_of(*specs), objective=objective, prompt_tokens=900, new_tokens=8)
    found, fastest = replicas(problem), whole_fastest(problem)
    alone = {
        spec["name"]: plan(replace(problem, cluster=cluster_of(spec))).prediction for spec in specs
    }
    seconds = {name: one.cost(problem.goal) for name, one in alone.items() if one is not None}
    best = min(seconds, key=seconds.__getitem__)
    assert best == ("b" if objective is Objective.LATENCY else "c")
    assert fastest.placement == f"{best}=0:8" and found.placement == f"{best}=0:8 x1"
    assert fastest.prediction is not None
    assert fastest.prediction.cost(problem.goal) == pytest.approx(seconds[best], rel=1e-12)
    row = rows_of(problem)["whole-fastest"]
    assert (
        row.reason.startswith(f"requests enter at {best}; ")
        and row.request_s == fastest.prediction.request_s
    )


def test_of_equal_nodes_the_source_is_taken() -> None:
    cluster = replace(cluster_of(device("a", 12), device("b", 12), device("c", 12)), source="b")
    for objective in (Objective.REQUEST, Objective.THROUGHPUT):
        problem = problem_of(cluster, objective=objective, concurrency=1)
        assert whole_fastest(problem).placement == "b=0:8"


# Limits


def test_nodes_that_cannot_hold_the_model_are_left_out_and_named() -> None:
    problem = problem_of(
        cluster_of(device("a", 12), device("b", 5), device("c", 12)), concurrency=4
    )
    found = replicas(problem)
    assert set(shares(found)) == {"a", "c"}
    assert "left out: b (" in found.reason and "GiB short" in found.reason
    nobody = rows_of(problem_of(cluster_of(device("a", 5), device("b", 6))))
    for name in ("whole-fastest", "replicas"):
        row = nobody[name]
        assert not row.feasible and row.placement == "" and row.throughput_tps is None
        assert (
            row.reason.startswith("no node can hold the whole model: b (") and "a (" in row.reason
        )
    assert nobody["edgeshard"].feasible


def test_why_says_what_each_node_adds() -> None:
    two = replicas(
        problem_of(cluster_of(device("a", 12), device("b", 12, 200e9)), concurrency=16)
    ).replicas
    rates = {item.node: f"{item.prediction.throughput_tps:.2f}" for item in two}

    def why(*devices: dict[str, Any]) -> str:
        return replicas(problem_of(cluster_of(*devices), concurrency=80)).reason

    assert (
        why(device("a", 12), device("b", 12, 200e9)) == f"a {rates['a']}, b {rates['b']} tokens/s"
    )
    equal = [device(name, 12) for name in "acdef"]
    assert why(*equal) == f"{rates['a']} tokens/s on each node"
    assert (
        why(*equal, device("b", 12, 200e9))
        == f"{rates['a']} (a) to {rates['b']} tokens/s (b) on a node"
    )


def test_limits_of_a_problem_hold_for_replicas() -> None:
    cluster = cluster_of(device("a", 12), device("b", 12), device("c", 12, 200e9))
    problem = problem_of(cluster, concurrency=12)
    assert set(shares(replicas(problem))) == {"a", "b", "c"}
    assert set(shares(replicas(replace(problem, exclude=("b",))))) == {"a", "c"}
    assert set(shares(replicas(replace(problem, max_nodes=2)))) == {"a", "c"}
    assert shares(replicas(replace(problem, max_nodes=1))) == {"c": 8}
    for limit, words in (
        ({"reserve": {"c": 5 * LAYER}}, "GiB short"),
        ({"max_share": {"c": 0.5}}, "max_share is 0.5"),
        ({"head_on_source": True}, "may see no token"),
    ):
        found = replicas(replace(problem, **limit))
        assert "c" not in shares(found) and "a" in shares(found)
        assert words in found.reason, limit
        assert whole_fastest(replace(problem, **limit)).placement.startswith("a=")
    assert "min_nodes is 2" in replicas(replace(problem, min_nodes=2)).reason
    slow = replace(problem, max_time_per_token_s=0.06)
    assert "ms per token" in replicas(slow).reason and set(shares(replicas(slow))) == {"c"}
    assert replicas(slow).time_per_token_s <= 0.06


def test_quantised_weights_fit_where_others_do_not() -> None:
    problem = problem_of(cluster_of(device("a", 12), device("b", 4)), concurrency=4)
    assert set(shares(replicas(problem))) == {"a"}
    small = replace(problem, quantisation=Quantisation.INT8)
    assert set(shares(replicas(small))) == {"a", "b"}


class Steady:
    """Measured times of a node whose step takes as long whatever is in it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        return self.seconds

    def embedding_s(self, phase: StepShape) -> float:
        return 0.0

    def head_s(self, phase: StepShape) -> float:
        return 0.0

    def step_s(self, hidden_bytes: float) -> float:
        return 0.0


def test_measured_times_are_used() -> None:
    cluster = cluster_of(device("a", 12), device("b", 12))
    problem = problem_of(cluster, concurrency=8, times={"b": Steady(1e-4)})
    found = replicas(problem)
    assert found.replicas[-1].prediction.time_per_token_s == pytest.approx(8e-4)
    # Each of its requests is 32 tokens in as many steps of 0.8 ms; the other node adds more than an
    # eighth request here.
    assert found.replicas[-1].prediction.throughput_tps == pytest.approx(
        found.replicas[-1].requests / 8e-4
    )
    assert whole_fastest(problem).placement == "b=0:8"


# Words


def wins_fully(problem: PlanProblem) -> bool:
    """Whether the plan itself, searched to the end, is better than replicas."""
    planned, whole = plan(problem, alternatives=0).prediction, replicas(problem)
    if planned is None or not whole.replicas:
        return planned is not None
    return planned.cost(problem.goal) < whole.cost(problem.goal) * (1 - 1e-6)


def test_whether_a_plan_wins_is_known_before_its_search_has_ended() -> None:
    """Five nodes that all differ have more cuts than are counted out."""
    speeds = [100e9, 150e9, 220e9, 300e9, 500e9]
    model = model_from_config("deeper", SMALL_CONFIG | {"num_hidden_layers": 23})
    answers = []
    for rate, room in ((2e6, 30), (1e9, 24.3)):
        nodes = [device(name, room, speed) for name, speed in zip("abcde", speeds, strict=True)]
        problem = problem_of(
            cluster_of(*nodes, bandwidth_bps=rate), concurrency=16, model=model, new_tokens=480
        )
        costs = Costs(problem)
        assert count_cuts(costs.decode(Load())) > MOST_COUNTED
        answers.append(plan_wins(problem))
        assert answers[-1] is wins_fully(problem), rate
    assert answers == [False, True]


def test_the_verdict_says_from_how_many_requests_on_splitting_is_better() -> None:
    # Each node holds the model and five requests; over both there is room for many.
    cluster = cluster_of(device("a", 9.5), device("b", 9.5))
    problem = problem_of(cluster, concurrency=2, new_tokens=992)
    text = verdict(problem, compare(problem))
    assert text.startswith(
        "Do not split it: the model whole on each of 2 nodes (a=0:8 x1 | b=0:8 x1) gives "
    )
    wins = [n for n in range(1, 33) if wins_fully(replace(problem, concurrency=n))]
    assert wins == list(range(12, 33)), "a threshold, in this problem"
    assert f"Splitting would be better from {wins[0]} requests at once on." in text
    more = replace(problem, concurrency=wins[0])
    text = verdict(more, compare(more))
    assert text.startswith("Split it: the plan gives ")
    assert (
        f"Not splitting would be as good or better with up to {wins[0] - 1} requests at once."
        in text
    )
    free = replace(problem, concurrency=None)
    assert (
        f"Not splitting would be as good or better with up to {wins[0] - 1} requests at once."
        in verdict(free, compare(free))
    )


def test_the_verdict_says_when_no_number_of_requests_changes_it() -> None:
    problem = problem_of(cluster_of(device("a", 12), device("b", 12)), concurrency=8)
    text = verdict(problem, compare(problem))
    assert "Splitting would be better with none of 1, 2, 4, ..., " in text
    assert not any(wins_fully(replace(problem, concurrency=2**n)) for n in range(8))


def with_rate(problem: PlanProblem, rate: float) -> PlanProblem:
    return replace(problem, cluster=replace(problem.cluster, default_link=Link(rate)))


def test_the_verdict_says_which_links_would_change_it() -> None:
    cluster = cluster_of(device("a", 12), device("b", 12, 400e9), bandwidth_bps=1e6)
    only_a = problem_of(cluster, objective=Objective.REQUEST, max_share={"b": 0.9})
    text = verdict(only_a, compare(only_a))
    assert text.startswith("Do not split it: the model whole on a gives ") and " a request" in text
    factors = [f for f in (2**e for e in range(1, 11)) if wins_fully(with_rate(only_a, f * 1e6))]
    assert (
        factors[0] > 2
        and f"Splitting would be better with links {factors[0]} times as fast." in text
    )
    fast = with_rate(only_a, 1e9)
    text = verdict(fast, compare(fast))
    assert text.startswith("Split it: the plan gives ")
    factors = [
        f for f in (2**e for e in range(1, 11)) if not wins_fully(with_rate(only_a, 1e9 / f))
    ]
    assert (
        f"Not splitting would be as good or better with links of 1/{factors[0]} of their rate."
        in text
    )


def test_the_verdict_says_which_memory_would_change_it() -> None:
    problem = problem_of(cluster_of(device("a", 14), device("b", 14)), concurrency=8)
    text = verdict(problem, compare(problem))
    words = text.partition("Splitting would be better if no node had more than ")[2]
    size = 2**30 * float(words.partition(" GiB to use.")[0])
    total = problem.cluster.nodes[0].device.usable_bytes

    def wins(usable: float) -> bool:
        return wins_fully(replace(problem, reserve=dict.fromkeys("ab", total - usable)))

    assert wins(size) and not wins(size + 0.5e9)
    short = problem_of(cluster_of(device("a", 14), device("b", 4, 400e9)), concurrency=8)
    assert "Too little memory for the whole model: b (" in verdict(short, compare(short))


def test_the_verdict_of_nodes_none_of_which_holds_the_model_and_of_one_node() -> None:
    problem = problem_of(cluster_of(device("a", 5), device("b", 6)))
    assert verdict(problem, compare(problem)).startswith(
        "Split it: no node can hold the whole model: b ("
    )
    tiny = problem_of(cluster_of(device("a", 2), device("b", 2)))
    assert verdict(tiny, compare(tiny)).startswith("There is no plan: no node can hold")
    alone = problem_of(cluster_of(device("a", 12)))
    assert verdict(alone, compare(alone)) == ""
    beside = problem_of(cluster_of(device("a", 0.5), device("b", 12)), concurrency=2)
    assert "the model whole on b, where requests then come in, gives " in verdict(
        beside, compare(beside)
    )
    assert "from a there is no plan" in verdict(beside, compare(beside))


def test_with_many_boxes_the_verdict_is_said_without_planning_again() -> None:
    cluster = with_nodes(cluster_of(device("a", 12)), "a", MOST_TRIED, "test")
    problem = problem_of(cluster, concurrency=20)
    text = verdict(problem, compare(problem))
    assert (
        text.startswith("Do not split it: the model whole on each of 17 nodes gives ")
        and text.count(". ") == 0
    )


def test_a_plan_advises_replicas_only_where_they_are_clearly_better() -> None:
    def advised(bandwidth_bps: float, speed: float, count: int = 0) -> tuple[float, str]:
        cluster = cluster_of(device("a", 12), device("b", 12, speed), bandwidth_bps=bandwidth_bps)
        cluster = with_nodes(cluster, "b", count, "test") if count else cluster
        result = plan(problem_of(cluster, concurrency=8), alternatives=0)
        assert result.prediction is not None
        return replicas(result.problem).throughput_tps / result.prediction.throughput_tps, advice(
            result
        )

    gain, text = advised(1e6, 300e9)
    assert (
        gain > 1.05
        and text.startswith("the model whole on ")
        and f", {100 * (gain - 1):.0f} % more: see" in text
    )
    gain, text = advised(1e10, 100e9)
    assert 1 < gain < 1.05 and text == ""
    gain, text = advised(1e6, 300e9, MOST_ADVISED - 1)
    assert gain > 1.05 and text == ""
    short = plan(problem_of(cluster_of(device("a", 2), device("b", 2))), alternatives=0)
    assert advice(short) == ""
    split = plan(problem_of(cluster_of(device("a", 5), device("b", 6))), alternatives=0)
    assert advice(split) == ""
