"""Predictions of two placements, compared."""

from __future__ import annotations

import pytest

from edgeshard.domain.deployments.placement import Prediction


def of_rate(throughput_tps: float, together_tps: float | None = None) -> Prediction:
    return Prediction(1.0, 0.1, throughput_tps, "", objective="throughput", together_tps=together_tps)


def test_rates_of_one_kind_are_compared_and_else_those_of_requests_that_start_together() -> None:
    assert of_rate(100, 80).gain_of(of_rate(120, 40)) == pytest.approx(0.2)
    assert of_rate(100).gain_of(of_rate(110)) == pytest.approx(0.1)
    assert of_rate(100, 80).gain_of(of_rate(88)) == pytest.approx(0.1)
    assert of_rate(80).gain_of(of_rate(100, 88)) == pytest.approx(0.1)
