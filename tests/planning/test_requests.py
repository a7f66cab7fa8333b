"""Plans for one request: its time, prompt included, and its first token, against every plan counted
out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_floor import CutFloor, PromptFloor, StepTables
from edgeshard.planning.inputs.devices import Cluster, parse_cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, built_in_model, model_from_config
from edgeshard.planning.report.explain import explain
from edgeshard.planning.search import request_search
from edgeshard.planning.search.plan import GAP_OF_REQUEST, GAP_OF_TTFT, plan, predict
from edgeshard.planning.simulation.forecast import forecast
from edgeshard.planning.simulation.serving import ServedRequest
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut
from tests.planning.oracles.brute_plans import Counted, best_value


def random_problem(seed: int, nodes: int, layers: int, **changes: object) -> PlanProblem:
    """Nodes, some of which can hold the whole model, links of 5 to 1,000 Mb/s, prompts of 16 to
    3,000 tokens."""
    dice = random.Random(seed)
    config = BUILT_IN_CONFIGS["llama2-7b"] | {"num_hidden_layers": layers, "vocab_size": 2000}
    model = model_from_config("small", config)
    layer = 2 * model.blocks[0].parameters
    devices = [
        {
            "name": f"b{index}",
            "memory_bytes": dice.uniform(0.4, 1.5) * layers * layer + 1.2e9,
            "bandwidth_bytes_per_s": 10 ** dice.uniform(10, 12),
            "flops": 10 ** dice.uniform(11.5, 13.5),
            "step_overhead_s": dice.choice((0.0, 1e-3, 5e-3)),
        }
        for index in range(nodes)
    ]
    links = [
        {
            "from": f"b{a}",
            "to": f"b{b}",
            "bandwidth_bps": 10 ** dice.uniform(6.7, 9),
            "latency_s": dice.uniform(0, 0.01),
        }
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    ]
    cluster = parse_cluster({"source": "b0", "device": devices, "link": links})
    prompt = dice.choice((16, 100, 256, 700, 1024, 3000))
    problem = PlanProblem(
        model,
        cluster,
        prompt_tokens=prompt,
        new_tokens=dice.choice((1, 2, 20, 200)),
        dtype=DType.FLOAT16,
    )
    return replace(problem, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", [Objective.REQUEST, Objective.TTFT])
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_serves_one_request_sooner(seed: int, objective: Objective) -> None:
    problem = random_problem(seed, nodes=2 + seed % 3, layers=4 + seed % 3, objective=objective)
    least_s = best_value(problem)
    result = plan(problem)
    if least_s == inf:
        assert not result.feasible
        return
    assert result.prediction is not None
    assert result.prediction.cost(objective) == pytest.approx(least_s, rel=1e-9)
    assert result.gap == 0.0
    assert result.gap_objective == (
        GAP_OF_REQUEST if objective is Objective.REQUEST else GAP_OF_TTFT
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_slicing_is_faster_than_its_floor(seed: int) -> None:
    problem = random_problem(
        seed, nodes=4, layers=6, asynchronous=bool(seed % 3), sliced=bool(seed % 4)
    )
    costs = Costs(problem)
    tables, dice = StepTables(costs), random.Random(seed)
    floor, closer = PromptFloor.of(tables), CutFloor(tables)
    counted = Counted(problem)
    held = [place for place in counted.placements() if counted.may_hold(*place)]
    cuts = [Cut(nodes, tuple(accumulate(counts))) for nodes, counts in held]
    for cut in dice.sample(cuts, min(20, len(cuts))):
        bound = float(floor.seconds(Cuts.of([cut]))[0])
        seconds = predict(costs, Load(), cut).ttft_s
        assert bound <= seconds * (1 + 1e-9)
        if problem.sliced:
            assert bound * (1 - 1e-9) <= closer.seconds(cut) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("objective", [Objective.REQUEST, Objective.TTFT])
@pytest.mark.parametrize("seed", range(10))
def test_too_many_cuts_leave_a_certified_gap(
    seed: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(seed, nodes=4, layers=6, objective=objective)
    exact = plan(problem)
    monkeypatch.setattr(request_search, "MOST_CUTS", 0)
    result = plan(problem)
    assert (result.prediction is None) == (exact.prediction is None)
    if result.prediction is None or exact.prediction is None:
        return
    assert result.gap is not None
    best, found = exact.prediction.cost(objective), result.prediction.cost(objective)
    assert found >= best * (1 - 1e-9)
    assert found * (1 - result.gap) <= best * (1 + 1e-9), "the certified bound is above a plan"
    assert found <= best * 1.1


def orin_and_3090(**changes: object) -> PlanProblem:
    cluster: Cluster = parse_cluster(
        {
            "source": "orin",
            "device": [{"name": "orin", "kind": "agx-orin"}, {"name": "gpu", "kind": "rtx-3090"}],
            "link": [{"bandwidth_bps": 10e6, "latency_s": 0.001}],
        }
    )
    model = built_in_model("llama2-7b")
    assert model is not None
    problem = PlanProblem(model, cluster, prompt_tokens=3000, new_tokens=100, dtype=DType.FLOAT16)
    return replace(problem, **changes)  # type: ignore[arg-type]


def test_a_slow_link_does_not_carry_a_long_prompt() -> None:
    """The least time per token as the only goal splits the model and takes 23 s a request, 19 s of
    it on the link."""
    whole = plan(orin_and_3090(objective=Objective.REQUEST))
    assert whole.placement == "orin=0:32" and whole.gap == 0.0
    assert whole.prediction is not None and whole.prediction.request_s <= 8.7
    latency = plan(orin_and_3090(objective=Objective.LATENCY))
    assert latency.prediction is not None and len(latency.stages) == 2
    assert latency.prediction.request_s > 2 * whole.prediction.request_s
    assert latency.gap_objective == "time per token"


def test_auto_for_one_request_is_request() -> None:
    auto = plan(orin_and_3090(objective=Objective.AUTO))
    request = plan(orin_and_3090(objective=Objective.REQUEST))
    assert auto.placement == request.placement and auto.prediction == request.prediction
    assert auto.gap_objective == GAP_OF_REQUEST


def test_alternatives_rank_by_the_objective_chosen() -> None:
    result = plan(orin_and_3090(objective=Objective.REQUEST))
    assert result.prediction is not None and result.alternatives
    times = [item.request_s for item in result.alternatives]
    assert times == sorted(times) and times[0] >= result.prediction.request_s
    assert any("a request, " in line for line in explain(result) if line.startswith("Runner-up"))


def test_the_time_per_token_asked_for_is_kept() -> None:
    free = plan(orin_and_3090(objective=Objective.REQUEST)).prediction
    fast = plan(orin_and_3090(objective=Objective.LATENCY)).prediction
    assert free is not None and fast is not None and fast.time_per_token_s < free.time_per_token_s
    limit = (free.time_per_token_s + fast.time_per_token_s) / 2
    bounded = plan(orin_and_3090(objective=Objective.REQUEST, max_time_per_token_s=limit))
    assert bounded.prediction is not None and bounded.prediction.time_per_token_s <= limit
    assert bounded.prediction.request_s > free.request_s
    none = plan(
        orin_and_3090(objective=Objective.REQUEST, max_time_per_token_s=fast.time_per_token_s / 2)
    )
    assert none.shortage is not None and none.shortage.constraint == "max_time_per_token"


def test_a_limit_that_only_another_cut_keeps_is_kept_without_counting_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt in one piece: the best sum breaks the limit, the quickest token does not."""
    monkeypatch.setattr(request_search, "MOST_CUTS", 0)
    problem = orin_and_3090(prompt_tokens=100, new_tokens=2)
    free = plan(replace(problem, objective=Objective.REQUEST)).prediction
    fast = plan(replace(problem, objective=Objective.LATENCY)).prediction
    assert free is not None and fast is not None and fast.time_per_token_s < free.time_per_token_s
    limit = (free.time_per_token_s + fast.time_per_token_s) / 2
    bounded = plan(
        replace(problem, objective=Objective.REQUEST, max_time_per_token_s=limit)
    ).prediction
    assert bounded is not None and bounded.time_per_token_s <= limit


@pytest.mark.parametrize("seed", range(8))
def test_serving_one_request_gives_the_prediction(seed: int) -> None:
    """The simulated head cuts the same slices, and nodes and links serve them in the same order."""
    problem = random_problem(seed, nodes=3, layers=5, objective=Objective.REQUEST, min_nodes=2)
    result = plan(problem)
    if result.prediction is None:
        return
    found = forecast(result, [ServedRequest(0.0, problem.prompt_tokens, problem.new_tokens)])
    assert found.ttft_s.mean == pytest.approx(result.prediction.ttft_s, rel=0.02)
