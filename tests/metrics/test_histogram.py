"""Histograms count as Prometheus wants them: by bounds that include their figure, each bucket with all below it."""

from __future__ import annotations

from edgeshard.metrics.histogram import Histogram


def test_a_bucket_has_all_figures_up_to_its_bound() -> None:
    counts = Histogram((0.1, 1.0, 10.0))
    for value in (0.05, 0.1, 0.5, 10.0, 11.0):
        counts.add(value)
    assert counts.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("10.0", 4.0), ("+Inf", 5.0)]
    assert abs(counts.sum - 21.65) < 1e-9
