"""Plans from noisy profiles, on the random sites of `oracles/noisy_profiles.py`."""

from __future__ import annotations

import pytest

from edgeshard.planning.inputs.problem import Objective
from edgeshard.profiles.grid import FULL_GRID, QUICK_GRID
from tests.planning.oracles.noisy_profiles import LIMITS, OBJECTIVES, run
from tests.support.forms import one_in

SITES = 30


@pytest.mark.long
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("noise", one_in(3, LIMITS))
def test_noise_costs_a_plan_little(noise: float, objective: Objective) -> None:
    found = run(noise, objective, SITES, FULL_GRID, seed=1)
    assert len(found.losses) == SITES and max(found.losses) <= LIMITS[noise]
    assert not found.falling_costs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_noise_nothing_is_lost(objective: Objective) -> None:
    assert run(0.0, objective, 10, FULL_GRID, seed=1).losses[-1] <= 0.01


def test_no_cost_of_a_quick_profile_falls_however_noisy() -> None:
    assert not run(0.6, Objective.REQUEST, 20, QUICK_GRID, seed=1).falling_costs
