"""The paper's test bed by data sheets: the results of its table must be reproduced, near the
roofline computed by hand.

By hand: decode time = fp32 layer bytes / memory bandwidth, usable memory 29 / 13 / 22 GB, no head,
no KV, no frames. Ours counts those too, so it is a little slower and the head takes the place of a
layer on the GPU.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.devices import parse_cluster, with_bandwidth
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.report.baselines import COMPARED, StrategyRow, compare
from edgeshard.planning.report.explain import explain
from edgeshard.planning.search.plan import plan, predict
from edgeshard.planning.solvers.instance import Cut

ROOT = Path(__file__).resolve().parents[2]


def paper(model: str, objective: Objective = Objective.LATENCY) -> PlanProblem:
    cluster = parse_cluster(
        tomllib.loads((ROOT / "deploy/examples/paper-testbed.toml").read_text())
    )
    spec = built_in_model(model)
    assert spec is not None and cluster.dtype is DType.FLOAT32
    work = cluster.workload
    assert (work.prompt_tokens, work.new_tokens) == (32, 96)
    return PlanProblem(
        spec,
        cluster,
        objective,
        32,
        96,
        batch=work.batch,
        concurrency=work.concurrency,
        dtype=DType.FLOAT32,
    )


def table(model: str, objective: Objective = Objective.LATENCY) -> dict[str, StrategyRow]:
    rows = {row.strategy: row for row in compare(paper(model, objective))}
    assert tuple(rows) == COMPARED
    return rows


def milliseconds(row: StrategyRow) -> float:
    assert row.feasible and row.time_per_token_s is not None
    return 1000 * row.time_per_token_s


def test_7b() -> None:
    rows = table("llama2-7b")
    assert milliseconds(rows["edge-solo"]) == pytest.approx(126.5, rel=0.03)
    assert milliseconds(rows["cloud-edge-even"]) == pytest.approx(208, rel=0.03)
    assert rows["cloud-edge-opt"].placement == rows["edge-solo"].placement, (
        "at 1 Mb/s the cloud does not help"
    )
    assert milliseconds(rows["cloud-edge-opt"]) == milliseconds(rows["edge-solo"])
    assert milliseconds(rows["edgeshard"]) == pytest.approx(48.5, rel=0.12)
    assert milliseconds(rows["edgeshard"]) < 0.6 * milliseconds(rows["edge-solo"])
    nodes = [stage.partition("=")[0] for stage in rows["edgeshard"].placement.split(",")]
    assert nodes[0] == "agx-1" and "cloud" in nodes[2:], "the cloud is reached through another node"
    assert any(
        "around the slow link agx-1 -> cloud" in line for line in explain(plan(paper("llama2-7b")))
    )
    assert rows["edgeshard"].gap == 0
    assert milliseconds(rows["edgeshard-paper"]) >= milliseconds(rows["edgeshard"])


def test_13b() -> None:
    rows = table("llama2-13b")
    assert not rows["edge-solo"].feasible and "GiB short" in rows["edge-solo"].reason
    assert not rows["cloud-edge-even"].feasible, (
        "in fp32 half of it, with the head, is more than 22 GB"
    )
    assert milliseconds(rows["edgeshard"]) == pytest.approx(172, rel=0.06)
    costs = Costs(paper("llama2-13b"))
    cloud = costs.names.index("cloud")
    even = predict(costs, Load(), Cut((costs.source, cloud), (20, 40)))
    assert 1000 * even.time_per_token_s == pytest.approx(315, rel=0.02), (
        "the even cut, if it did fit"
    )


def test_70b_needs_many_boxes() -> None:
    rows = table("llama2-70b")
    assert not any(
        rows[name].feasible for name in ("edge-solo", "cloud-edge-even", "cloud-edge-opt")
    )
    assert milliseconds(rows["edgeshard"]) == pytest.approx(1311, rel=0.02)
    assert rows["edgeshard"].nodes >= 10
    few = plan(replace(paper("llama2-70b"), max_nodes=rows["edgeshard"].nodes - 1))
    assert few.shortage is not None or (
        few.prediction is not None and len(few.stages) < rows["edgeshard"].nodes
    )
    none = plan(replace(paper("llama2-70b"), max_nodes=9))
    assert none.shortage is not None and none.shortage.constraint == "max_nodes"


@pytest.mark.parametrize("model", ["llama2-7b", "llama2-13b", "llama2-70b"])
@pytest.mark.one_in(3)
def test_throughput_is_no_worse_than_any_baseline(model: str) -> None:
    rows = table(model, Objective.THROUGHPUT)
    best = rows["edgeshard"].throughput_tps
    assert best is not None
    for row in rows.values():
        assert row.throughput_tps is None or row.throughput_tps <= best * (1 + 1e-9)


def test_bandwidth_between_source_and_cloud() -> None:
    """Cloud-Edge-Opt is local at 1 Mb/s, gains steeply up to 10 Mb/s and little beyond."""
    problem = paper("llama2-7b")
    times = []
    for rate in (1e6, 10e6, 50e6):
        cluster = with_bandwidth(problem.cluster, rate, ("agx-1", "cloud"))
        rows = {row.strategy: row for row in compare(replace(problem, cluster=cluster))}
        times.append(milliseconds(rows["cloud-edge-opt"]))
        assert milliseconds(rows["edgeshard"]) <= times[-1] * (1 + 1e-9)
    assert times[0] - times[1] > 4 * (times[1] - times[2]) > 0
