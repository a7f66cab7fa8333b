"""The solvers against CP-SAT on all of the tests' random instances; `make test` compares twenty
small ones."""

from __future__ import annotations

import pytest

from bench.sizes import sized
from edgeshard.planning.solvers import solve
from edgeshard.planning.solvers.linear import ROUNDING
from tests.planning.oracles.instances import RANDOM_SEEDS, random_instance, random_micro_batches
from tests.planning.oracles.proven import least


@pytest.mark.parametrize("seed", RANDOM_SEEDS[: sized(len(RANDOM_SEEDS), 4)])
def test_the_plans_are_those_that_cp_sat_proves_best(seed: int) -> None:
    instance, micro_batches = random_instance(seed), random_micro_batches(seed)
    for found, proven in (
        (solve.solve_latency(instance), least(instance)),
        (solve.solve_throughput(instance, micro_batches), least(instance, micro_batches)),
    ):
        assert (found is None) == (proven is None)
        if found is not None:
            assert found.value_s == pytest.approx(proven, rel=2 * ROUNDING)
