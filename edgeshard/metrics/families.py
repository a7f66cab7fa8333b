"""Metrics as values: a name, a meaning, labels, and a figure for each value of the labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from edgeshard.domain.ids import escaped
from edgeshard.metrics.histogram import Histogram

Sample = tuple[Sequence[str], float]
"""The values of the labels, in their order, and the figure."""


def gauge(name: str, meaning: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """The metric of a state as it is now."""
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), samples)


def counter(name: str, meaning: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """The metric of a figure that only grows, since the daemon began; `name` is without the `_total` that it gets."""
    return _filled(CounterMetricFamily(name, meaning, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, figure in samples:
        family.add_metric(_plain(values), figure)
    return family


def histogram(
    name: str, meaning: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    """The metric of figures by size, a histogram for each value of the labels."""
    family = HistogramMetricFamily(name, meaning, labels=labels)
    for values, counts in samples:
        family.add_metric(_plain(values), counts.buckets(), counts.sum)
    return family


def _plain(values: Sequence[str]) -> list[str]:
    """The values without characters that steer a terminal: they are from nodes and clients, and
    readers show them."""
    return [escaped(value) for value in values]
