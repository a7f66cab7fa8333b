"""The weights that nodes hold decide among plans that are nearly as good, and only among these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.packed_units import NOTHING_HELD, PackedParts
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.inputs.catalogue import DeviceSpec
from edgeshard.planning.inputs.devices import Cluster, ClusterNode, Link
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.report.explain import describe_locality
from edgeshard.planning.search.locality import LOCALITY_MARGIN, Lacking
from edgeshard.planning.search.plan import plan, predict
from edgeshard.planning.solvers.scoring import violations
from tests.planning.oracles.instances import random_problem
from tests.support.forms import one_in

GB = 1e9
LAYERS = 32


def node(name: str, speed: float = 1.0, memory: float = 10 * GB) -> ClusterNode:
    flops = dict.fromkeys(DType, 1e12 * speed)
    return ClusterNode(
        name, DeviceSpec("test", memory, 0.0, 100 * GB * speed, flops, False, "made up"), name
    )


def problem_of(held: dict[str, PackedParts], *nodes: ClusterNode, **changes: object) -> PlanProblem:
    """Llama2-7B in float16 needs two nodes of these."""
    cluster = Cluster(nodes, Link(1e9, 1e-3), source="a")
    model = built_in_model("llama2-7b")
    assert model is not None
    problem = PlanProblem(model, cluster, Objective.REQUEST, dtype=DType.FLOAT16, packed_parts=held)
    return replace(problem, **changes)  # type: ignore[arg-type]


def layers(first: int, end: int, **ends: bool) -> PackedParts:
    return PackedParts(frozenset(range(first, end)), **ends)


def test_of_nodes_that_are_alike_the_one_that_holds_the_layers_is_taken() -> None:
    nodes = (node("a"), node("b"), node("c"), node("d"))
    best = plan(problem_of({}, *nodes))
    assert (
        [stage.node for stage in best.stages] == ["a", "b"]
        and best.locality is None
        and not describe_locality(best)
    )
    first = best.stages[0].layers.end
    near = plan(problem_of({"d": layers(first, LAYERS, head=True)}, *nodes))
    assert near.placement == best.placement.replace("b=", "d=") and near.locality is not None
    assert near.locality.slower == pytest.approx(0.0) and near.gap == pytest.approx(best.gap)
    assert describe_locality(near) == (
        f"d holds layers {first}:32 packed: chosen over {best.placement}, as good, "
        f"{near.locality.saved_bytes / 2**30:.1f} GiB less to fetch and pack"
    )


def test_a_cut_moves_to_where_the_layers_are_and_says_what_that_costs() -> None:
    nodes = (node("a"), node("b", 1.02))
    best = plan(problem_of({}, *nodes))
    end = best.stages[0].layers.end
    held = {"a": layers(0, end + 5, embedding=True), "b": layers(end + 5, LAYERS, head=True)}
    near = plan(problem_of(held, *nodes))
    assert near.placement == f"a=0:{end + 5},b={end + 5}:32" and near.locality is not None
    assert near.locality.lacking_bytes == 0 and 0 < near.locality.slower <= LOCALITY_MARGIN
    assert f", {100 * near.locality.slower:.1f} % slower, " in describe_locality(near)
    assert (
        near.gap is not None
        and near.gap >= near.locality.slower / (1 + near.locality.slower) - 1e-9
    )


@pytest.mark.parametrize(("speed", "name"), [(1.0 / 1.04, "c"), (1.0 / 1.2, "b")])
def test_a_node_that_is_too_slow_is_not_taken_for_what_it_holds(speed: float, name: str) -> None:
    nodes = (node("a", memory=4 * GB), node("b", memory=30 * GB), node("c", speed, memory=30 * GB))
    found = plan(
        problem_of({"c": layers(0, LAYERS, embedding=True, head=True)}, *nodes, max_nodes=2)
    )
    assert found.stages[-1].node == name and (found.locality is None) == (name == "b")


def test_a_promised_time_comes_before_what_is_held() -> None:
    nodes = (
        node("a", memory=4 * GB),
        node("b", memory=30 * GB),
        node("c", 1.0 / 1.03, memory=30 * GB),
    )
    held = {"c": layers(0, LAYERS, head=True)}
    free = plan(problem_of(held, *nodes, max_nodes=2))
    assert free.stages[-1].node == "c" and free.prediction is not None
    promised = plan(
        problem_of(
            held, *nodes, max_nodes=2, max_time_per_token_s=0.99 * free.prediction.time_per_token_s
        )
    )
    assert promised.stages[-1].node == "b" and promised.locality is None


@pytest.mark.parametrize(
    "objective",
    [Objective.REQUEST, Objective.TTFT, Objective.LATENCY, Objective.THROUGHPUT, Objective.AUTO],
)
@pytest.mark.parametrize("seed", one_in(4, range(25)))
def test_it_costs_at_most_the_margin_and_breaks_no_rule(seed: int, objective: Objective) -> None:
    problem = random_problem(seed, objective)
    best = plan(problem, alternatives=0)
    nobody = dict.fromkeys(problem.cluster.names, NOTHING_HELD)
    assert plan(replace(problem, packed_parts=nobody), alternatives=0) == replace(
        best, problem=replace(problem, packed_parts=nobody)
    )
    random = np.random.default_rng(seed)
    count = problem.model.layer_count
    held = {
        name: PackedParts(
            frozenset(np.flatnonzero(random.random(count) < random.random()).tolist()),
            bool(random.random() < 0.5),
        )
        for name in problem.cluster.names
        if random.random() < 0.7
    }
    wanted = replace(problem, packed_parts=held)
    near = plan(wanted, alternatives=0)
    assert (near.prediction is None) == (best.prediction is None)
    if near.prediction is None or best.prediction is None:
        return
    costs, goal = Costs(wanted), problem.goal
    assert not violations(costs.decode(near.prediction.load), near.prediction.cut)
    assert near.prediction == predict(costs, near.prediction.load, near.prediction.cut)
    limit = problem.max_time_per_token_s
    assert limit is None or near.prediction.time_per_token_s <= limit * (1 + 1e-9)
    least, cost = best.prediction.cost(goal), near.prediction.cost(goal)
    assert cost <= least * (1 + LOCALITY_MARGIN) * (1 + 1e-9)
    lacking = Lacking(costs)
    assert lacking.of(near.prediction.cut) <= lacking.of(best.prediction.cut)
    assert near.gap is not None and best.gap is not None
    assert cost * (1 - near.gap) == pytest.approx(least * (1 - best.gap), rel=1e-6)
    if near.locality is not None:
        assert near.locality.slower == pytest.approx(cost / least - 1, abs=1e-9)
        assert near.locality.best == best.placement and near.locality.lacking_bytes == lacking.of(
            near.prediction.cut
        )
