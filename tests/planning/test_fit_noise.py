"""Plans from noisy profiles, by the random sites of `bench/fit_noise.py`, which makes 200 for each noise."""

from __future__ import annotations

import pytest

from bench.fit_noise import LIMITS, OBJECTIVES, run
from edgeshard.planning.inputs.problem import Objective
from edgeshard.profiles.grid import FULL_GRID, QUICK_GRID
from tests.support.forms import one_in

SITES = 30


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("noise", one_in(3, LIMITS))
def test_noise_costs_a_plan_little(noise: float, objective: Objective) -> None:
    found = run(noise, objective, SITES, FULL_GRID, seed=1)
    assert found["plans"] == SITES and found["beyond_limit"] == 0
    assert not found["falling_costs"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_noise_nothing_is_lost(objective: Objective) -> None:
    assert run(0.0, objective, 10, FULL_GRID, seed=1)["worst_loss"] <= 0.01


def test_no_cost_of_a_quick_profile_falls_however_noisy() -> None:
    assert not run(0.6, Objective.REQUEST, 20, QUICK_GRID, seed=1)["falling_costs"]
