"""Throughput plans against every placement at every load, counted out and scored without the
planner's own code."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.search import rate_search
from edgeshard.planning.search.plan import GAP_OF_RATE, PlanResult, plan
from tests.planning.oracles.brute_plans import Rate, best_rate
from tests.planning.oracles.instances import grown, random_problem
from tests.support.forms import of_the_day

SAME = 1e-9
SEEDS = of_the_day(10, range(60))


@cache
def counted(seed: int) -> Rate:
    return best_rate(random_problem(seed))


@cache
def found(seed: int) -> PlanResult:
    """The plan of a search without exhaustive counts; only if `searched` holds."""
    assert rate_search.MOST_COUNTED == 0
    return plan(random_problem(seed), alternatives=0)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted out: small sites take the way of large ones."""
    monkeypatch.setattr(rate_search, "MOST_COUNTED", 0)


def rate(result: PlanResult) -> float:
    return 0.0 if result.prediction is None else result.prediction.throughput_tps


def check_limits(problem: PlanProblem, result: PlanResult) -> None:
    assert result.prediction is not None and result.gap_objective == GAP_OF_RATE
    load, limit = result.prediction.load, problem.request_limit
    assert load.batch <= problem.batch_limit and (limit is None or load.requests <= limit)
    assert all(stage.memory.needed <= stage.memory.usable for stage in result.stages)
    if problem.max_time_per_token_s is not None:
        assert result.prediction.time_per_token_s <= problem.max_time_per_token_s


@pytest.mark.parametrize("seed", SEEDS)
def test_where_cuts_are_few_the_plan_is_the_best_there_is(seed: int) -> None:
    problem, best = random_problem(seed), counted(seed)
    result = plan(problem, alternatives=0)
    assert rate(result) == pytest.approx(best.tokens_per_s, rel=SAME), best
    if result.prediction is None:
        assert result.shortage is not None
        return
    assert result.gap == 0
    check_limits(problem, result)


@pytest.mark.parametrize("seed", of_the_day(5, range(40)))
def test_so_it_is_of_layers_of_two_kinds(seed: int) -> None:
    problem = random_problem(seed, hybrid=True)
    assert rate(plan(problem, alternatives=0)) == pytest.approx(
        best_rate(problem).tokens_per_s, rel=SAME
    )


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_placement_beats_the_certified_bound(seed: int) -> None:
    problem, best = random_problem(seed), counted(seed)
    result = found(seed)
    if result.prediction is None:
        assert best.tokens_per_s == 0
        return
    assert result.gap is not None
    check_limits(problem, result)
    assert rate(result) <= best.tokens_per_s * (1 + SAME)
    assert best.tokens_per_s <= rate(result) / (1 - result.gap) * (1 + SAME)


@pytest.mark.usefixtures("searched")
def test_the_search_finds_nearly_always_the_best() -> None:
    """Without the memory of exhaustive counts: on most sites the optimum, and a gap that shows
    it."""
    shares, gaps = [], []
    for seed in SEEDS:
        result = found(seed)
        if result.gap is not None:
            shares.append(rate(result) / counted(seed).tokens_per_s)
            gaps.append(result.gap)
    assert sum(share > 1 - SAME for share in shares) >= 0.9 * len(shares)
    assert sum(gap < 0.01 for gap in gaps) >= 0.75 * len(gaps)


@pytest.mark.parametrize("seed", range(100, 120))
def test_more_of_anything_never_lowers_the_rate(seed: int) -> None:
    problem = random_problem(seed)
    before = rate(plan(problem, alternatives=0))
    for name, wider in grown(problem).items():
        after = plan(wider, alternatives=0)
        assert after.gap in (0, None), name
        assert rate(after) >= before * (1 - SAME), name


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.one_in(3)
def test_where_it_is_not_exact_by_no_more_than_the_gap(seed: int) -> None:
    problem = random_problem(seed)
    before = plan(problem, alternatives=0)
    for name, wider in grown(problem).items():
        after = plan(wider, alternatives=0)
        if before.prediction is not None:
            assert after.gap is not None, name
            assert rate(after) >= rate(before) * (1 - after.gap) * (1 - SAME), name


def two_nodes(source: str, **options: Any) -> PlanProblem:
    """An RTX 3090 and an Orin NX over 20 Mb/s, with Llama2-7B."""
    model = built_in_model("llama2-7b")
    assert model is not None
    cluster = parse_cluster(
        {
            "source": source,
            "device": [{"name": name, "kind": name} for name in ("rtx-3090", "orin-nx")],
            "link": {"bandwidth_bps": 20e6, "latency_s": 0.0005},
        }
    )
    fields: dict[str, Any] = {
        "objective": Objective.THROUGHPUT,
        "dtype": DType.FLOAT16,
        "concurrency": 8,
        **options,
    }
    return PlanProblem(model=model, cluster=cluster, **fields)


def test_micro_batches_of_six_where_eight_do_not_fit() -> None:
    result = plan(two_nodes("rtx-3090", prompt_tokens=1500, new_tokens=500))
    assert result.prediction is not None and result.gap == 0
    assert result.prediction.throughput_tps >= 257
    assert result.prediction.load.batch == 6


@pytest.mark.parametrize("source", ["rtx-3090", "orin-nx"])
@pytest.mark.parametrize("prompt", [100, 1500])
def test_answers_of_two_tokens(source: str, prompt: int) -> None:
    """Nearly all of such a request is its prompt."""
    problem = two_nodes(source, prompt_tokens=prompt, new_tokens=2)
    assert rate(plan(problem)) >= 0.99 * best_rate(problem).tokens_per_s


def test_a_time_per_token_that_only_small_loads_keep() -> None:
    problem = two_nodes("rtx-3090", prompt_tokens=500, new_tokens=500)
    free = plan(problem).prediction
    assert free is not None
    limited = replace(problem, max_time_per_token_s=0.99 * free.time_per_token_s)
    result = plan(limited)
    check_limits(limited, result)
    assert 0 < rate(result) < free.throughput_tps
    assert rate(result) == pytest.approx(best_rate(limited).tokens_per_s)
