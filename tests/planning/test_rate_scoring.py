"""Rates of many cuts at once: the same as one by one, and never above what larger loads are bounded
by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.load_search import loads, sizes
from edgeshard.planning.search.plan import predict
from edgeshard.planning.search.rate_scoring import Best, CutRates, most_micro_batches
from edgeshard.planning.solvers.all_cuts import every_cut
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.scoring import violations
from edgeshard.planning.solvers.walks import single_kinds
from tests.planning.oracles.instances import random_problem


def allowed_loads(costs: Costs, cut: Cut, batch: int) -> list[Load]:
    """Every m that memory, requests and time allow, one by one."""
    limit = costs.problem.max_time_per_token_s
    found = [Load(batch, m) for m in range(1, most_micro_batches(costs, batch) + 1)]
    found = [load for load in found if not violations(costs.decode(load), cut)]
    return [
        load
        for load in found
        if limit is None or predict(costs, load, cut).time_per_token_s <= limit
    ]


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_a_cut_is_rated_at_its_best_load(seed: int) -> None:
    costs = Costs(replace(random_problem(seed), batch=5))
    rates, rng = CutRates(costs), np.random.default_rng(seed)
    for cuts in every_cut(rates.least, single_kinds(rates.least)):
        some = cuts.take(np.sort(rng.choice(len(cuts), size=min(3, len(cuts)), replace=False)))
        places = rates.places(some)
        figures = {
            batch: rates.figures(places, batch) for batch in range(1, costs.problem.batch_limit + 1)
        }
        for index in range(len(some)):
            cut, best = some.cut(index), 0.0
            for batch, found in figures.items():
                every = allowed_loads(costs, cut, batch)
                rated = [predict(costs, load, cut).throughput_tps for load in every]
                assert found.micro_batches[index] == len(every)
                assert found.rates()[index] == pytest.approx(max(rated, default=0.0), rel=1e-9)
                for smaller in range(1, batch + 1):
                    assert figures[smaller].at_most(batch)[index] >= max(rated, default=0.0) * (
                        1 - 1e-9
                    )
                best = max(best, *rated, 0.0)
            one = Best()
            one.look(rates, [places.take(np.array([index]))])
            assert one.rate == pytest.approx(best, rel=1e-9)
            if one.cut is not None:
                assert predict(costs, one.load, cut).throughput_tps == pytest.approx(best, rel=1e-9)


def test_micro_batches_that_only_wait_are_left_out() -> None:
    """A single node takes proportionally longer for each additional micro-batch."""
    free: dict[str, Any] = {
        "max_time_per_token_s": None,
        "min_nodes": 1,
        "max_share": {},
        "reserve": {},
    }
    problem = replace(random_problem(1), max_nodes=1, **free)
    roomy = tuple(
        replace(n, device=replace(n.device, memory_bytes=1e12)) for n in problem.cluster.nodes
    )
    costs = Costs(replace(problem, cluster=replace(problem.cluster, nodes=roomy), concurrency=None))
    rates = CutRates(costs)
    best = Best()
    best.look(rates, [rates.places(cuts) for cuts in every_cut(rates.least)])
    assert best.cut is not None and best.micro_batches == 1


def test_sizes_are_all_up_to_eight_and_then_grow() -> None:
    assert sizes(1) == [1] and sizes(6) == [1, 2, 3, 4, 5, 6]
    assert sizes(16) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]
    costs = Costs(
        replace(random_problem(3), objective=Objective.THROUGHPUT, concurrency=9, batch=16)
    )
    every = loads(costs)
    assert every[0] == Load() and Load(7, 1) in every and Load(9, 1) in every
    assert all(load.requests <= 9 for load in every) and len(every) == len(set(every))


def test_neighbours_are_cuts_of_distinct_nodes_with_all_layers() -> None:
    least = CutRates(Costs(random_problem(5))).least
    kinds = single_kinds(least)
    for cuts in every_cut(least, kinds):
        cut = cuts.cut(len(cuts) // 2)
        near = neighbours(cut, kinds)
        assert cut not in near or len(cut.nodes) > 1
        for other in near:
            assert other.nodes[0] == least.source and len(set(other.nodes)) == len(
                other.nodes
            ) == len(other.ends)
            assert other.ends[-1] == least.layers and list(other.ends) == sorted(other.ends)
