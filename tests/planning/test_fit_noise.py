"""Plans from noisy profiles, by the benchmark's random sites: 40 for each noise here, 200 in `bench/fit_noise.py`."""

from __future__ import annotations

import pytest

from bench.fit_noise import LIMITS, run
from edgeshard.profiles.grid import FULL_GRID, QUICK_GRID


@pytest.mark.parametrize("noise", LIMITS)
def test_noise_costs_a_plan_little(noise: float) -> None:
    found = run(noise, 40, FULL_GRID, seed=1)
    assert found["plans"] == 40 and found["worst_loss"] <= LIMITS[noise]
    assert not found["falling_costs"]


def test_without_noise_nothing_is_lost() -> None:
    assert run(0.0, 20, FULL_GRID, seed=1)["worst_loss"] <= 0.01


def test_no_cost_of_a_quick_profile_falls_however_noisy() -> None:
    assert not run(0.6, 20, QUICK_GRID, seed=1)["falling_costs"]
