"""Plans of random sites and workloads for every objective, against every placement at every load
counted out.

`make test` compares some of them. If the cuts are few, a plan must be the best one. On large sites
no cut that a long random search finds may beat the certified bound. With more nodes, memory,
bandwidth, batch or concurrency, no plan may be worse by more than its gap. How near plans and
bounds come is printed. For energy the sites have watts.

    pytest bench/test_planner_plans.py -s
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

import numpy as np
import pytest

from bench.sizes import sized
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.search import rate_search, request_search
from edgeshard.planning.search.plan import PlanResult, plan
from tests.planning.oracles import energies
from tests.planning.oracles.brute_plans import best_value
from tests.planning.oracles.instances import grown, random_problem
from tests.planning.oracles.random_search import RandomSearch

pytestmark = pytest.mark.timeout(3600)

COUNTED = range(sized(300, 2))
SEARCHED = range(sized(1000, 8))
LARGE = range(sized(1000, 4))
CHAINS = range(sized(100, 2))
WITH_WATTS = range(sized(300, 1))
STARTS = 4
LOOKS = {
    Objective.REQUEST: 40,
    Objective.TTFT: 40,
    Objective.LATENCY: 3000,
    Objective.THROUGHPUT: 2000,
}
"""Cuts a climb of the random search may look at, about."""
SAME = 1e-9
SAME_JOULES = 1e-6
OBJECTIVES = (Objective.REQUEST, Objective.TTFT, Objective.LATENCY, Objective.THROUGHPUT)


def seconds(result: PlanResult) -> float:
    """The objective's value, infinite without a plan; for a throughput, the seconds a token
    takes."""
    return inf if result.prediction is None else result.prediction.cost(result.problem.goal)


def joules(result: PlanResult) -> float:
    """The energy of a token, infinite without a plan."""
    return inf if result.prediction is None else result.prediction.joules_per_token or 0.0


def searched(problem: PlanProblem, monkeypatch: pytest.MonkeyPatch) -> PlanResult:
    """The plan with nothing counted out."""
    with monkeypatch.context() as patch:
        patch.setattr(rate_search, "MOST_COUNTED", 0)
        patch.setattr(request_search, "MOST_CUTS", 0)
        return plan(problem, alternatives=0)


def tell(gaps: dict[Objective, list[float]], lost: dict[Objective, list[float]]) -> None:
    """Print how many plans are the best known, and how large their gaps are."""
    for objective, found in gaps.items():
        best = sum(part <= SAME for part in lost[objective])
        parts = ", ".join(
            f"{part} %: {100 * np.percentile(found, part):.2f} %" for part in (50, 75, 90, 100)
        )
        worst = 100 * max(lost[objective])
        print(
            f"\n{objective}: {best} of {len(found)} are the best known, the worst loses "
            f"{worst:.1f} %"
        )
        print(f"    gaps {parts}")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", COUNTED)
def test_a_plan_is_the_best_of_all(seed: int, objective: Objective) -> None:
    problem = random_problem(seed, objective)
    found = plan(problem, alternatives=0)
    assert seconds(found) == pytest.approx(best_value(problem), rel=SAME)
    assert found.prediction is None or found.gap == 0


def test_bounds_are_not_broken_where_nothing_is_counted_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps = defaultdict[Objective, list[float]](list)
    lost = defaultdict[Objective, list[float]](list)
    for seed in SEARCHED:
        problem = random_problem(seed, OBJECTIVES[seed % len(OBJECTIVES)])
        found = searched(problem, monkeypatch)
        best_s = seconds(plan(problem, alternatives=0))
        assert (found.prediction is None) == (best_s == inf), seed
        if found.gap is None:
            continue
        assert (
            seconds(found) * (1 - found.gap) * (1 - SAME) <= best_s <= seconds(found) * (1 + SAME)
        ), seed
        gaps[problem.goal].append(found.gap)
        lost[problem.goal].append(1 - best_s / seconds(found))
    tell(gaps, lost)


def test_energy_plans_are_the_best_and_bounds_are_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps, lost = list[float](), list[float]()
    for seed in WITH_WATTS:
        problem = energies.random_problem(seed)
        least_j = energies.least_energy(problem).joules_per_token
        counted = plan(problem, alternatives=0)
        assert joules(counted) == pytest.approx(least_j, rel=SAME_JOULES), seed
        if least_j == inf:
            continue
        found = searched(problem, monkeypatch)
        gap, own_j = found.gap or 0.0, joules(found)
        assert own_j * (1 - gap) <= least_j * (1 + SAME_JOULES) and own_j >= least_j * (
            1 - SAME_JOULES
        ), seed
        gaps.append(gap)
        lost.append(max(0.0, own_j / least_j - 1 - SAME_JOULES) if least_j else 0.0)
    tell({Objective.ENERGY: gaps}, {Objective.ENERGY: lost})


def test_no_cut_of_a_large_site_beats_its_bound() -> None:
    gaps = defaultdict[Objective, list[float]](list)
    lost = defaultdict[Objective, list[float]](list)
    for seed in LARGE:
        problem = random_problem(seed, OBJECTIVES[seed % len(OBJECTIVES)], large=True)
        found = plan(problem, alternatives=0)
        search = RandomSearch(problem, seed)
        given = [found.prediction.cut] if found.prediction is not None else []
        other_s = search.run(STARTS, LOOKS[problem.goal], given)
        if found.gap is None:
            assert other_s == inf, seed
            continue
        assert other_s >= seconds(found) * (1 - found.gap) * (1 - SAME), seed
        gaps[problem.goal].append(found.gap)
        lost[problem.goal].append(max(0.0, 1 - other_s / seconds(found)))
    tell(gaps, lost)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_more_of_anything_makes_no_plan_worse(large: bool) -> None:
    """But by its gap; of those counted out not at all."""
    worst = 0.0
    for seed in CHAINS:
        problem = random_problem(seed, OBJECTIVES[seed % len(OBJECTIVES)], large=large)
        before_s = seconds(plan(problem, alternatives=0))
        for name, wider in grown(problem).items():
            after = plan(wider, alternatives=0)
            after_s = seconds(after)
            if before_s < inf:
                assert after.gap is not None, (seed, name)
                assert after_s * (1 - after.gap) <= before_s * (1 + SAME), (seed, name)
                worst = max(worst, after_s / before_s - 1)
    print(f"\nworse by at most {100 * worst:.2f} %, within the gap")
