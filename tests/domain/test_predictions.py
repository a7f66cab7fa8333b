"""Predictions of two placements, compared."""

from __future__ import annotations

import pytest

from edgeshard.domain.deployments.placement import Prediction, rank_among


def of_rate(throughput_tps: float, together_tps: float | None = None) -> Prediction:
    return Prediction(
        1.0, 0.1, throughput_tps, "", objective="throughput", together_tps=together_tps
    )


def test_rates_of_one_kind_are_compared_and_else_those_of_requests_that_start_together() -> None:
    assert of_rate(100, 80).gain_of(of_rate(120, 40)) == pytest.approx(0.2)
    assert of_rate(100).gain_of(of_rate(110)) == pytest.approx(0.1)
    assert of_rate(100, 80).gain_of(of_rate(88)) == pytest.approx(0.1)
    assert of_rate(80).gain_of(of_rate(100, 88)) == pytest.approx(0.1)


def test_where_some_stream_all_are_ranked_by_the_rate_of_requests_that_start_together() -> None:
    steady = of_rate(100, 80)
    slower = of_rate(95, 94)
    streams = of_rate(90)
    assert min((steady, slower), key=rank_among((steady, slower))) == steady
    assert min((steady, slower), key=rank_among((steady, None, slower))) == steady
    assert sorted((steady, streams, slower), key=rank_among((steady, streams, slower))) == [
        slower,
        streams,
        steady,
    ]


def test_costs_are_ranked_whatever_streams() -> None:
    quick, slow = (
        Prediction(1.0, 0.1, 5.0, "", objective="request", request_s=seconds)
        for seconds in (2.0, 3.0)
    )
    assert min((slow, quick), key=rank_among((slow, quick))) == quick
    assert slow.gain_of(quick) == pytest.approx(1 / 3)
