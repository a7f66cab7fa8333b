"""The paper's own algorithms, run as written, compared with the optimum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgeshard.planning.solvers import subset
from edgeshard.planning.solvers.instance import Instance
from edgeshard.planning.solvers.paper import MemoryModel, algorithm_1, algorithm_2
from edgeshard.planning.solvers.scoring import score, violations
from tests.planning.oracles import brute
from tests.planning.oracles.instances import RANDOM_SEEDS, random_instance


def four_layers() -> Instance:
    return replace(
        random_instance(0, 2, 4),
        compute_s=np.repeat([[10e-3], [1e-3]], 4, axis=1),
        hop_s=np.full((2, 2), 5e-3),
        layer_bytes=np.ones(4),
        capacity_bytes=np.array([4.0, 2.0]),
        embed_bytes=0.0,
        head_bytes=0.0,
        tied_bytes=0.0,
        stage_bytes=0.0,
        embed_s=np.zeros(2),
        head_s=np.zeros(2),
        overhead_s=np.zeros(2),
        return_s=np.zeros((2, 2)),
        latency_s=np.zeros((2, 2)),
    )


@pytest.mark.parametrize(
    ("memory", "wanted_s"), [(MemoryModel.LITERAL, 40e-3), (MemoryModel.TRACKED, 32e-3)]
)
def test_algorithm_1_misses_the_27_ms_of_the_four_layer_case(
    memory: MemoryModel, wanted_s: float
) -> None:
    found = algorithm_1(four_layers(), memory)
    assert found is not None and found.value_s == pytest.approx(wanted_s, rel=1e-9)


def test_algorithm_1_is_worse_than_the_optimum_on_part_of_the_instances(
    record_property: Callable[[str, object], None],
) -> None:
    counts: Counter[tuple[MemoryModel, str]] = Counter()
    feasible, worst = 0, 0.0
    for seed in RANDOM_SEEDS:
        instance = random_instance(seed)
        best = subset.solve_round(instance)
        if best is None:
            continue
        feasible += 1
        for memory in MemoryModel:
            found = algorithm_1(instance, memory)
            if found is None:
                counts[memory, "found nothing"] += 1
            elif found.value_s > best.value_s * (1 + 1e-9):
                counts[memory, "worse"] += 1
                worst = max(worst, found.value_s / best.value_s - 1)
            elif found.cut is None:
                counts[memory, "comes back to a node"] += 1
            else:
                counts[memory, "equal"] += 1
            if found is not None and found.cut is not None:
                assert score(instance, found.cut).round_s == pytest.approx(found.value_s, rel=1e-9)
                assert found.value_s >= best.value_s * (1 - 1e-9), "a plan below the optimum"
    # Shown by `pytest -rP` and in the JUnit report.
    record_property(
        "algorithm_1", f"of {feasible} feasible, worse by up to {worst:.0%}: {dict(counts)}"
    )
    assert counts[MemoryModel.LITERAL, "worse"] > 10
    assert counts[MemoryModel.LITERAL, "found nothing"] > feasible / 2
    assert counts[MemoryModel.TRACKED, "worse"] > feasible / 4
    assert counts[MemoryModel.DISTINCT, "worse"] > feasible / 4


def test_the_distinct_variant_gives_plans_that_may_be_used() -> None:
    for seed in range(0, 200, 3):
        instance = random_instance(seed)
        found = algorithm_1(instance, MemoryModel.DISTINCT)
        if found is not None:
            assert found.cut is not None
            assert violations(instance, found.cut) == ()


def test_algorithm_2_finds_the_least_bottleneck_but_not_the_best_rate() -> None:
    slower = compared = 0
    for seed in range(80):
        made = random_instance(seed, 2 + seed % 4, 4 + seed % 6, asynchronous=True)
        instance = replace(
            made, return_s=np.zeros_like(made.return_s), latency_s=np.zeros_like(made.latency_s)
        )
        cut = algorithm_2(instance)
        plans = [one for one in brute.every_plan(instance) if len(one[2])]
        assert (cut is None) == (not plans)
        if cut is None:
            continue
        compared += 1
        assert violations(instance, cut) == ()
        result = score(instance, cut)
        assert result.bottleneck_s == pytest.approx(min(one[3].min() for one in plans), rel=1e-8)
        slower += max(result.round_s, 2 * result.bottleneck_s) > brute.best(instance, 2)[0] * (
            1 + 1e-6
        )
    assert compared > 50 and slower > 10
