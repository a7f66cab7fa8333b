"""A plan under load: the plan's own figures if a formula holds, otherwise the expected effects of
load."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.report.explain import explain
from edgeshard.planning.search.plan import PlanResult, plan
from edgeshard.planning.simulation.forecast import Forecast, forecast, together
from edgeshard.planning.simulation.serving import ServedRequest

FAR_APART_S = 1000.0


def planned(**changes: object) -> PlanResult:
    """On three nodes; no single one can hold the model."""
    cluster = parse_cluster(
        {
            "source": "a",
            "device": [
                {"name": "a", "kind": "orin-nx"},
                {"name": "b", "kind": "orin-nx"},
                {"name": "c", "kind": "rtx-3090"},
            ],
            "link": [{"bandwidth_bps": 200e6, "latency_s": 0.002}],
        }
    )
    model = built_in_model("llama2-13b")
    assert model is not None
    problem = PlanProblem(model, cluster, prompt_tokens=100, new_tokens=40)
    return plan(replace(problem, **changes), alternatives=0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> PlanResult:
    return planned()


@pytest.fixture(scope="module")
def shared() -> PlanResult:
    return planned(objective=Objective.THROUGHPUT, concurrency=8)


def test_one_request_at_a_time_gets_what_the_plan_predicts(alone: PlanResult) -> None:
    found = forecast(alone, [ServedRequest(FAR_APART_S * n, 100, 40) for n in range(3)])
    prediction = alone.prediction
    assert prediction is not None and len(alone.stages) > 1
    assert found.ttft_s.median == pytest.approx(prediction.ttft_s, rel=0.01)
    for spread in (found.inter_token_s, found.time_per_token_s):
        assert spread.median == pytest.approx(prediction.time_per_token_s, rel=0.01)
        assert spread.p99 == pytest.approx(spread.mean, rel=0.01)
    whole_s = prediction.ttft_s + 39 * prediction.time_per_token_s
    assert found.end_to_end_s.p90 == pytest.approx(whole_s, rel=0.01)
    assert (found.requests, found.tokens) == (3, 120)
    assert found.span_s == pytest.approx(2 * FAR_APART_S + whole_s, rel=0.01)


@pytest.mark.parametrize("head_on_source", [False, True])
def test_a_batch_that_starts_together_gets_what_the_plan_predicts(head_on_source: bool) -> None:
    result = planned(objective=Objective.THROUGHPUT, concurrency=8, head_on_source=head_on_source)
    assert result.prediction is not None and result.prediction.load.requests > 1
    found = together(result)
    assert found.tokens_per_s == pytest.approx(result.prediction.throughput_tps, rel=0.02)
    assert found.requests == result.prediction.load.requests
    assert together(result, Mode.SEQUENTIAL).tokens_per_s < found.tokens_per_s


def test_a_node_is_busy_for_what_its_steps_take(alone: PlanResult) -> None:
    """A single request: at any time one node computes or one link sends, or the frame is in
    flight."""
    found = forecast(alone, [ServedRequest(0.0, 100, 40)])
    assert [node.node for node in found.nodes] == [stage.node for stage in alone.stages]
    assert [node.receiver for node in found.nodes] == [
        stage.node for stage in (*alone.stages[1:], alone.stages[0])
    ]
    hops_s = 40 * len(alone.stages) * 0.002
    busy = sum(node.computing + node.sending for node in found.nodes)
    assert busy * found.span_s + hops_s == pytest.approx(found.span_s, rel=1e-6)
    assert found.bubble_share == pytest.approx(
        1 - sum(node.computing for node in found.nodes) / len(found.nodes)
    )


def test_more_load_is_slower_for_each_and_faster_in_all(shared: PlanResult) -> None:
    def at(gap_s: float) -> Forecast:
        return forecast(shared, [ServedRequest(gap_s * n, 100, 40) for n in range(40)])

    runs = [at(gap_s) for gap_s in (50.0, 0.5, 0.1)]
    for calm, busy in pairwise(runs):
        assert busy.ttft_s.p90 > calm.ttft_s.p90
        assert busy.tokens_per_s > calm.tokens_per_s
        assert busy.bubble_share < calm.bubble_share
    assert runs[1].inter_token_s.p99 > runs[0].inter_token_s.p99, "prompts come between tokens"
    # More arrives than is done: who comes later waits longer.
    assert runs[-1].ttft_s.p99 > 1.5 * runs[-1].ttft_s.median
    assert all(run.ttft_s.median <= run.ttft_s.p90 <= run.ttft_s.p99 for run in runs)


def test_a_long_prompt_goes_in_slices_while_nobody_decodes() -> None:
    """As the head does and the plan predicts: nodes compute in parallel, so that the first token
    arrives sooner."""
    result = planned(prompt_tokens=1024, new_tokens=2)
    assert result.prediction is not None
    found = forecast(result, [ServedRequest(0.0, 1024, 2)])
    whole_s = result.prediction.prefill.round_s
    assert found.ttft_s.mean == pytest.approx(result.prediction.ttft_s, rel=0.01)
    assert found.ttft_s.mean < 0.9 * whole_s
    prefills = [
        v for v in found.visits if v.kind == "prefill" and v.station == result.stages[0].node
    ]
    assert len(prefills) > 1024 / 512, "more than the budget of a step would make"
    (line,) = [
        line for line in explain(result) if line.startswith("A single prompt is sent in slices of ")
    ]
    whole_ms = 1000 * whole_s
    assert line.endswith(
        f"not {whole_ms:.1f} ms." if whole_ms < 1000 else f"not {whole_ms / 1000:.2f} s."
    )
    assert not any("slices" in line for line in explain(planned()))


def test_a_visit_is_seen_where_and_when_it_was(alone: PlanResult) -> None:
    found = forecast(alone, [ServedRequest(1.0, 100, 3)])
    first = found.visits[0]
    assert (first.station, first.kind, first.start_s) == ("a", "prefill", 1.0)
    assert found.visits[-1].kind == "return"
    kinds = [visit.kind for visit in found.visits if visit.station == "a"]
    assert kinds == ["prefill", "decode", "decode"]
    stations = {visit.station for visit in found.visits}
    assert stations == {n.node for n in found.nodes} | {
        f"{n.node} -> {n.receiver}" for n in found.nodes
    }
    assert all(earlier.start_s <= later.start_s for earlier, later in pairwise(found.visits))


def test_a_request_that_the_plan_has_no_memory_for_is_refused_by_name(alone: PlanResult) -> None:
    with pytest.raises(InvalidArgumentError, match="the plan holds 140 for a request") as caught:
        forecast(alone, [ServedRequest(0.0, 100, 40), ServedRequest(0.0, 101, 40)])
    assert caught.value.field == "requests[1]"


def test_with_the_head_on_the_source_arrivals_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="head_on_source"):
        forecast(planned(head_on_source=True), [ServedRequest(0.0, 1, 1)])


def test_answers_of_one_token_have_no_gaps(alone: PlanResult) -> None:
    found = forecast(alone, [ServedRequest(0.0, 10, 1)])
    assert found.inter_token_s.p99 == found.time_per_token_s.mean == 0
    assert found.ttft_s == found.end_to_end_s
