"""Joules per token: of any cut by its definition, and of plans against every plan counted out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import energy_j
from edgeshard.planning.inputs.catalogue import CATALOGUE
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.report.baselines import compare
from edgeshard.planning.report.explain import explain
from edgeshard.planning.search import rate_search, request_search
from edgeshard.planning.search.plan import GAP_OF_ENERGY, PlanResult, plan, predict
from edgeshard.planning.solvers.instance import Cut
from tests.planning.oracles import energies
from tests.planning.oracles.brute_plans import Counted
from tests.planning.oracles.energies import least_energy
from tests.planning.test_requests import random_problem

WATTS = ((5.0, 40.0), (60.0, 300.0), (0.0, 15.0), (90.0, 90.0))


def powered(problem: PlanProblem) -> PlanProblem:
    """The same nodes with some watts each."""
    nodes = tuple(
        replace(node, device=replace(node.device, idle_w=idle_w, busy_w=busy_w))
        for node, (idle_w, busy_w) in zip(problem.cluster.nodes, WATTS, strict=False)
    )
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


@pytest.mark.parametrize("seed", range(8))
def test_a_request_alone_takes_its_span_idle_and_its_computing_busy(seed: int) -> None:
    problem = powered(random_problem(seed, nodes=3, layers=6, objective=Objective.REQUEST))
    counted, place = Counted(problem), ((0, 2, 1), (2, 1, 3))
    costs, cut = Costs(problem), Cut(place[0], (2, 3, 6))
    prompt, first_s = counted.prompt(*place)
    more = problem.new_tokens - 1
    span = first_s + more * counted.token_s(*place)
    tokens = counted.computing(*place, 1, False)
    joules = sum(
        WATTS[node][0] * span
        + (WATTS[node][1] - WATTS[node][0]) * (prompt[stage] + more * tokens[stage])
        for stage, node in enumerate(cut.nodes)
    )
    assert energy_j(costs, cut, Load()) == pytest.approx(joules, rel=1e-9)
    prediction = predict(costs, Load(), cut)
    assert prediction.joules_per_token == pytest.approx(joules / problem.new_tokens, rel=1e-9)
    assert prediction.request_s == pytest.approx(span, rel=1e-9)


def test_watts_that_are_not_known_make_no_energy() -> None:
    problem = random_problem(1, nodes=2, layers=4)
    assert energy_j(Costs(problem), Cut((0, 1), (2, 4)), Load()) is None
    assert predict(Costs(problem), Load(), Cut((0, 1), (2, 4))).joules_per_token is None


def node(**changes: Any) -> dict[str, Any]:
    return {"source": "b", "device": [{"name": "b", **changes}]}


def test_a_cluster_file_gives_watts_or_takes_the_catalogues() -> None:
    own = parse_cluster(node(kind="orin-nx", idle_w=4.0, busy_w=22)).nodes[0].device
    assert (own.idle_w, own.busy_w) == (4.0, 22.0)
    assert "idle_w, busy_w: cluster file" in own.source
    assert (
        parse_cluster(node(kind="orin-nx")).nodes[0].device.busy_w
        == CATALOGUE["orin-nx"].busy_w
        == 25
    )


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"idle_w": 3.0}, "device[0].busy_w", "is missing"),
        ({"busy_w": 3.0}, "device[0].idle_w", "is missing"),
        ({"idle_w": 30, "busy_w": 3.0}, "device[0].busy_w", "less than idle_w"),
        ({"idle_w": -1, "busy_w": 3.0}, "device[0].idle_w", "at least 0"),
        ({"idle_w": "low", "busy_w": 3.0}, "device[0].idle_w", "number"),
    ],
)
def test_watts_that_cannot_be_are_refused(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        parse_cluster(node(kind="orin-nx", **changes))
    assert caught.value.field == field


def test_every_figure_of_the_catalogue_has_a_source() -> None:
    for spec in CATALOGUE.values():
        assert (spec.idle_w is None) == (spec.busy_w is None)
        if spec.busy_w is not None:
            assert spec.idle_w is not None and spec.idle_w < spec.busy_w
            assert f"power: {spec.busy_w} W" in spec.source


SMALL = [
    seed
    for seed, problem in ((seed, energies.random_problem(seed)) for seed in range(60))
    if len(problem.cluster.nodes) <= 4 and problem.model.layer_count <= 7
]
SAME = 1e-6


def small(seed: int) -> PlanProblem:
    """2 to 4 nodes and 2 to 7 layers, with watts. One request, or 2 to 6 at most; some with a limit
    on the time per token.
    """
    return energies.random_problem(seed)


@cache
def least(seed: int) -> float:
    return least_energy(small(seed)).joules_per_token


def joules(result: PlanResult) -> float:
    if result.prediction is None:
        return inf
    assert result.prediction.joules_per_token is not None and result.gap_objective == GAP_OF_ENERGY
    return result.prediction.joules_per_token


def test_the_problems_are_of_all_sorts() -> None:
    problems = [small(seed) for seed in SMALL]
    assert sum(problem.request_limit == 1 for problem in problems) > 5
    assert sum(problem.request_limit != 1 for problem in problems) > 5
    assert sum(
        problem.max_time_per_token_s is not None and least(seed) < inf
        for seed, problem in zip(SMALL, problems, strict=True)
    )
    assert sum(least(seed) < inf for seed in SMALL) > 12


@pytest.mark.parametrize("seed", SMALL)
def test_no_plan_takes_less_energy(seed: int) -> None:
    problem = small(seed)
    result = plan(problem, alternatives=0)
    assert joules(result) == pytest.approx(least(seed), rel=SAME)
    if result.prediction is None:
        assert result.shortage is not None
        return
    assert result.gap == 0
    load, limit = result.prediction.load, problem.request_limit
    assert load.batch <= problem.batch_limit and (limit is None or load.requests <= limit)
    assert all(stage.memory.needed <= stage.memory.usable for stage in result.stages)
    if problem.max_time_per_token_s is not None:
        assert result.prediction.time_per_token_s <= problem.max_time_per_token_s


@pytest.mark.parametrize("seed", SMALL)
def test_too_many_cuts_leave_a_gap_that_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_search, "MOST_CUTS", 0)
    monkeypatch.setattr(rate_search, "MOST_COUNTED", 0)
    result = plan(small(seed), alternatives=0)
    if result.prediction is None:
        assert least(seed) == inf
        return
    assert result.gap is not None
    assert joules(result) * (1 - result.gap) <= least(seed) * (1 + SAME)
    assert joules(result) >= least(seed) * (1 - SAME)


@pytest.mark.parametrize("seed", SMALL[:12])
def test_more_room_to_choose_never_takes_more(seed: int) -> None:
    problem = small(seed)
    fewer = replace(problem, max_nodes=None, exclude=(problem.cluster.nodes[-1].name,))
    assert joules(plan(replace(problem, max_nodes=None), 0)) <= joules(plan(fewer, 0)) * (1 + SAME)
    fastest = plan(
        replace(problem, objective=Objective.LATENCY, max_time_per_token_s=None), 0
    ).prediction
    if fastest is None:
        return
    limits = (1.01 * fastest.time_per_token_s, 2 * fastest.time_per_token_s, None)
    found = [joules(plan(replace(problem, max_time_per_token_s=limit), 0)) for limit in limits]
    assert inf > found[0] >= found[1] * (1 - SAME) >= found[2] * (1 - 2 * SAME)
    alone, some, more = (
        joules(plan(replace(problem, concurrency=count), 0)) for count in (1, 3, 6)
    )
    assert alone >= some * (1 - SAME) >= more * (1 - 2 * SAME)


def two_nodes(**changes: object) -> PlanProblem:
    """A node that sips and a node that gulps, and is twenty times as fast; the model fits each of
    them."""
    cluster = parse_cluster(
        {
            "source": "orin",
            "device": [{"name": "orin", "kind": "agx-orin"}, {"name": "gpu", "kind": "rtx-3090"}],
            "link": [{"bandwidth_bps": 1e9, "latency_s": 0.0005}],
        }
    )
    model = built_in_model("llama2-7b")
    assert model is not None
    problem = PlanProblem(model, cluster, Objective.ENERGY, dtype=DType.FLOAT16)
    return replace(problem, **changes)  # type: ignore[arg-type]


def test_energy_is_bought_with_time_as_far_as_the_limit_allows() -> None:
    thrifty = plan(two_nodes()).prediction
    fast = plan(two_nodes(objective=Objective.REQUEST)).prediction
    assert thrifty is not None and fast is not None
    assert thrifty.time_per_token_s > fast.time_per_token_s
    assert thrifty.cost(Objective.ENERGY) < fast.cost(Objective.ENERGY)
    limit = (fast.time_per_token_s + thrifty.time_per_token_s) / 2
    between = plan(two_nodes(max_time_per_token_s=limit)).prediction
    assert between is not None and between.time_per_token_s <= limit
    assert (
        thrifty.cost(Objective.ENERGY)
        < between.cost(Objective.ENERGY)
        <= fast.cost(Objective.ENERGY)
    )
    none = plan(two_nodes(max_time_per_token_s=fast.time_per_token_s / 100))
    assert none.shortage is not None and none.shortage.constraint == "max_time_per_token"


def test_many_requests_share_what_weights_take() -> None:
    alone, many = plan(two_nodes()), plan(two_nodes(concurrency=8))
    assert many.prediction is not None and many.prediction.load.requests == 8
    assert joules(many) < joules(alone) / 3


def test_nodes_of_unknown_power_are_named() -> None:
    problem = two_nodes()
    first, second = problem.cluster.nodes
    without = replace(second, device=replace(second.device, idle_w=None, busy_w=None))
    problem = replace(problem, cluster=replace(problem.cluster, nodes=(first, without)))
    with pytest.raises(
        InvalidArgumentError, match="power of gpu is unknown; give idle_w and busy_w"
    ) as caught:
        plan(problem)
    assert (caught.value.field, caught.value.reason) == ("objective", "UNKNOWN_POWER")
    assert joules(plan(replace(problem, exclude=("gpu",)))) < inf
    rows = {row.strategy: row for row in compare(replace(problem, objective=Objective.REQUEST))}
    assert rows["edge-solo"].joules_per_token and rows["cloud-edge-even"].joules_per_token is None


def test_runner_ups_and_other_strategies_are_judged_by_energy() -> None:
    result = plan(two_nodes(concurrency=4))
    words = " ".join(explain(result))
    assert "fewest joules per token with at most 4 requests" in words and "J per token, " in words
    taken = [item.joules_per_token for item in result.alternatives]
    assert taken and taken == sorted(taken, key=lambda value: value or inf)
    assert all(value and value >= joules(result) * (1 - SAME) for value in taken)
    rows = compare(two_nodes(concurrency=4))
    assert rows[-1].gap == 0
    for row in rows:
        assert row.joules_per_token and row.gap == pytest.approx(
            1 - joules(result) / row.joules_per_token
        )
