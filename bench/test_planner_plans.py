"""Throughput plans of random sites and workloads against every placement at every load, counted out.

`make test` compares sixty of them. Where the cuts are few a plan must be the best there is; with nothing counted out,
as on large sites, no placement may beat the certified bound, and how near plans and bounds come is printed.

    pytest bench/test_planner_rates.py -s
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bench.brute_rates import best_rate, random_problem
from edgeshard.planning import rate_search
from edgeshard.planning.plan import plan

pytestmark = pytest.mark.timeout(3600)

COUNTED = range(300)
BOUNDED = range(1000)
SAME = 1e-9


@cache
def highest(seed: int) -> float:
    return best_rate(random_problem(seed)).tokens_per_s


@pytest.mark.parametrize("seed", COUNTED)
def test_a_plan_is_the_best_of_all(seed: int) -> None:
    found = plan(random_problem(seed), alternatives=0)
    rate = found.prediction.throughput_tps if found.prediction is not None else 0.0
    assert rate == pytest.approx(highest(seed), rel=SAME)
    assert found.prediction is None or found.gap == 0


def test_bounds_are_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_search, "MOST_COUNTED", 0)
    shares, gaps = [], []
    for seed in BOUNDED:
        found = plan(random_problem(seed), alternatives=0)
        if found.prediction is None:
            assert highest(seed) == 0, seed
            continue
        assert found.gap is not None
        share = found.prediction.throughput_tps / highest(seed)
        assert 1 - found.gap <= share * (1 + SAME) and share <= 1 + SAME, seed
        shares.append(share)
        gaps.append(found.gap)
    exact = sum(share > 1 - SAME for share in shares)
    print(f"\n{exact} of {len(shares)} are the best there is, the worst reaches {100 * min(shares):.1f} % of it")
    for part in (50, 75, 90, 99):
        print(f"{part} % of the gaps are at most {100 * np.percentile(gaps, part):.2f} %")
