"""Plans for every objective against every placement counted out from the definitions, on sites of
every sort.

`bench/test_planner_plans.py` has hundreds of them, and large sites.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search import request_search
from edgeshard.planning.search.plan import PlanResult, plan
from edgeshard.planning.solvers.instance import with_tokens
from tests.planning.oracles.brute_plans import best_rate, best_value, least_seconds
from tests.planning.oracles.instances import grown, random_instance, random_problem
from tests.planning.oracles.random_search import RandomSearch
from tests.support.forms import of_the_day, one_in

SAME = 1e-9
SINGLE = (Objective.REQUEST, Objective.TTFT, Objective.LATENCY)
SEEDS = (*range(10), 412, 615)
"""In 412 steps do not follow each other; in 615 hundreds of cuts have floors below the best."""


def seconds(result: PlanResult) -> float:
    """The objective's value, infinite without a plan."""
    return inf if result.prediction is None else result.prediction.cost(result.problem.goal)


@pytest.mark.parametrize("seed", one_in(4, SEEDS))
def test_no_placement_is_better(seed: int) -> None:
    truth = least_seconds(random_problem(seed, Objective.REQUEST), SINGLE)
    for objective, least_s in truth.items():
        found = plan(random_problem(seed, objective), alternatives=0)
        assert seconds(found) == pytest.approx(least_s, rel=SAME), objective
        assert found.gap in (0, None), objective


@pytest.mark.parametrize("seed", of_the_day(4, range(20)))
def test_no_placement_is_better_for_layers_of_two_kinds(seed: int) -> None:
    truth = least_seconds(random_problem(seed, Objective.REQUEST, hybrid=True), SINGLE)
    for objective, least_s in truth.items():
        found = plan(random_problem(seed, objective, hybrid=True), alternatives=0)
        assert seconds(found) == pytest.approx(least_s, rel=SAME), objective


@pytest.mark.parametrize("objective", [Objective.REQUEST, Objective.TTFT])
@pytest.mark.parametrize("seed", range(30, 38))
def test_a_bound_holds_where_nothing_is_counted_out(
    seed: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(seed, objective)
    best_s = seconds(plan(problem, alternatives=0))
    monkeypatch.setattr(request_search, "MOST_CUTS", 0)
    found = plan(problem, alternatives=0)
    assert (found.prediction is None) == (best_s == inf)
    if found.gap is not None:
        assert (
            seconds(found) * (1 - found.gap) * (1 - SAME) <= best_s <= seconds(found) * (1 + SAME)
        )


@pytest.mark.parametrize("seed", [8, 13])
def test_a_large_site_with_missing_links_has_a_plan_and_a_bound(seed: int) -> None:
    problem = random_problem(seed, Objective.TTFT, large=True)
    found = plan(problem, alternatives=0)
    other_s = RandomSearch(problem, seed).run(starts=1, looks=20)
    assert found.prediction is not None and found.gap is not None
    assert other_s >= seconds(found) * (1 - found.gap) * (1 - SAME)


@pytest.mark.parametrize("objective", SINGLE)
@pytest.mark.parametrize("seed", range(60, 64))
def test_more_of_anything_makes_no_request_slower(seed: int, objective: Objective) -> None:
    problem = random_problem(seed, objective)
    before_s = seconds(plan(problem, alternatives=0))
    for name, wider in grown(problem).items():
        assert seconds(plan(wider, alternatives=0)) <= before_s * (1 + SAME), name


def test_no_tokens_over_a_missing_link_are_no_number() -> None:
    prompt = random_instance(0, nodes=3, layers=4)
    prompt.hop_s[0, 1] = np.inf
    assert np.array_equal(with_tokens(prompt, prompt, 0).hop_s, prompt.hop_s)


def test_the_value_of_a_rate_is_its_seconds() -> None:
    problem = random_problem(0)
    assert best_value(problem) == 1 / best_rate(problem).tokens_per_s
