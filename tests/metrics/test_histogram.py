"""Histograms count as Prometheus wants them: by bounds that include their figure, each bucket with
all below it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeshard.metrics.histogram import Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_a_bucket_has_all_figures_up_to_its_bound() -> None:
    counts = Histogram(BOUNDS)
    for value in (0.05, 0.1, 0.5, 10.0, 11.0):
        counts.add(value)
    assert counts.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("10.0", 4.0), ("+Inf", 5.0)]
    assert abs(counts.sum - 21.65) < 1e-9


def filled(values: list[float]) -> Histogram:
    counts = Histogram(BOUNDS)
    for value in values:
        counts.add(value)
    return counts


@given(
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=40),
    st.sampled_from((0.0, 0.05, 0.5, 0.95, 0.99, 1.0)),
)
@example([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 0.5)
def test_a_quantile_is_wrong_by_less_than_its_buckets_width(
    values: list[float], share: float
) -> None:
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = filled(values).quantile(share)
    assert found is not None
    if exact > BOUNDS[-1]:
        assert found == BOUNDS[-1]
        return
    low = max((bound for bound in (0.0, *BOUNDS) if bound < exact), default=0.0)
    high = min(bound for bound in BOUNDS if bound >= exact)
    assert low <= found <= high, "in the same bucket"


def test_a_quantile_of_the_figures_since() -> None:
    counts = filled([0.05] * 100)
    before = counts.counts()
    assert counts.quantile(0.5, before) is None and filled([]).quantile(0.5) is None
    for _ in range(4):
        counts.add(5.0)
    assert counts.quantile(0.5, before) == pytest.approx(5.5)
    assert counts.quantile(0.5) == pytest.approx(0.052)
