"""Joules per token: of any cut by its definition, and of plans against every plan counted out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.catalogue import CATALOGUE
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.devices import parse_cluster
from edgeshard.planning.energy import energy_j
from edgeshard.planning.instance import Cut
from edgeshard.planning.plan import predict
from edgeshard.planning.problem import Objective, PlanProblem
from edgeshard.planning.prompt_time import PromptTimes
from tests.planning.request_truth import first_token_s, step_seconds, token_s
from tests.planning.test_requests import random_problem

WATTS = ((5.0, 40.0), (60.0, 300.0), (0.0, 15.0), (90.0, 90.0))


def powered(problem: PlanProblem) -> PlanProblem:
    """The same boxes with some watts each."""
    nodes = tuple(
        replace(node, device=replace(node.device, idle_w=idle_w, busy_w=busy_w))
        for node, (idle_w, busy_w) in zip(problem.cluster.nodes, WATTS, strict=False)
    )
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


@pytest.mark.parametrize("seed", range(8))
def test_a_request_alone_takes_its_span_idle_and_its_computing_busy(seed: int) -> None:
    problem = powered(random_problem(seed, boxes=3, layers=6, objective=Objective.REQUEST))
    costs, cut = Costs(problem), Cut((0, 2, 1), (2, 3, 6))
    computing, before = [0.0] * 3, 0
    slices = PromptTimes(costs).first_token(cut).slices
    for number, tokens in enumerate(slices):
        for stage, seconds in enumerate(step_seconds(problem, cut, tokens, before, number == len(slices) - 1)):
            computing[stage] += seconds
        before += tokens
    more, token = problem.new_tokens - 1, Costs(problem).decode(Load())
    span = first_token_s(problem, cut) + more * token_s(problem, cut)
    decode = [
        token.overhead_s[node] + token.compute_s[node, a:b].sum() for node, a, b in ((0, 0, 2), (2, 2, 3), (1, 3, 6))
    ]
    decode[0] += token.embed_s[0]
    decode[2] += token.head_s[1]
    joules = sum(
        WATTS[node][0] * span + (WATTS[node][1] - WATTS[node][0]) * (computing[stage] + more * decode[stage])
        for stage, node in enumerate(cut.nodes)
    )
    assert energy_j(costs, cut, Load()) == pytest.approx(joules, rel=1e-9)
    prediction = predict(costs, Load(), cut)
    assert prediction.joules_per_token == pytest.approx(joules / problem.new_tokens, rel=1e-9)
    assert prediction.request_s == pytest.approx(span, rel=1e-9)


def test_watts_that_are_not_known_make_no_energy() -> None:
    problem = random_problem(1, boxes=2, layers=4)
    assert energy_j(Costs(problem), Cut((0, 1), (2, 4)), Load()) is None
    assert predict(Costs(problem), Load(), Cut((0, 1), (2, 4))).joules_per_token is None


def box(**changes: Any) -> dict[str, Any]:
    return {"source": "b", "device": [{"name": "b", **changes}]}


def test_a_cluster_file_gives_watts_or_takes_the_catalogues() -> None:
    own = parse_cluster(box(kind="orin-nx", idle_w=4.0, busy_w=22)).nodes[0].device
    assert (own.idle_w, own.busy_w) == (4.0, 22.0)
    assert "idle_w, busy_w: cluster file" in own.source
    assert parse_cluster(box(kind="orin-nx")).nodes[0].device.busy_w == CATALOGUE["orin-nx"].busy_w == 25


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
        parse_cluster(box(kind="orin-nx", **changes))
    assert caught.value.field == field


def test_every_figure_of_the_catalogue_has_a_source() -> None:
    for spec in CATALOGUE.values():
        assert (spec.idle_w is None) == (spec.busy_w is None)
        if spec.busy_w is not None:
            assert spec.idle_w is not None and spec.idle_w < spec.busy_w
            assert f"power: {spec.busy_w} W" in spec.source
