"""Metrics as values: a name, a meaning, labels, and a figure for each value of the labels.

Also the figures of a daemon's own machine and certificate, and of stages that do not hold all in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from edgeshard.domain.ids import escaped
from edgeshard.domain.nodes.device import Condition, StageExperts, StageStreaming, StageSwap
from edgeshard.metrics.histogram import Histogram

Sample = tuple[Sequence[str], float]
"""The values of the labels, in their order, and the figure."""


def gauge(name: str, meaning: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """The metric of a state as it is now."""
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), samples)


def counter(name: str, meaning: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """The metric of a figure that only grows, since the daemon began; `name` is without the
    `_total` that it gets."""
    return _filled(CounterMetricFamily(name, meaning, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, figure in samples:
        family.add_metric(_plain(values), figure)
    return family


def histogram(
    name: str,
    meaning: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], Histogram]],
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


class OwnCondition:
    """`read` returns the condition of the machine that this daemon runs on."""

    def __init__(self, read: Callable[[], Condition | None]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        condition = self._read()
        if condition is None:
            return
        disk = "Of the disk with the state directory."
        yield gauge("edgeshard_disk_size_bytes", disk, (), [((), condition.disk_total_bytes)])
        yield gauge("edgeshard_disk_free_bytes", disk, (), [((), condition.disk_free_bytes)])
        written = "What that disk takes, flushed; 0 before it was measured."
        yield gauge(
            "edgeshard_disk_write_bytes_per_second", written, (), [((), condition.disk_write_bps)]
        )
        if condition.certificate_ends_s:
            ends = [((), condition.certificate_ends_s)]
            meaning = "When this daemon's certificate ends."
            yield gauge("edgeshard_certificate_expiry_timestamp_seconds", meaning, (), ends)


Part = TypeVar("Part")
_Told = tuple[tuple[str, str, Callable[[Part], float]], ...]


@dataclass(frozen=True, slots=True)
class TierFigures(Generic[Part]):
    """Figures of a part of a stage: states of `now`, and counts `since` it began.

    Each has a name, a meaning, and a function from the part to the figure.
    """

    now: _Told[Part]
    since: _Told[Part]

    def metrics(
        self, prefix: str, labels: Sequence[str], parts: Sequence[tuple[Sequence[str], Part]]
    ) -> Iterator[Metric]:
        """Metrics whose names begin with `prefix`, of parts by the values of their `labels`."""
        for family, figures in ((gauge, self.now), (counter, self.since)):
            for name, meaning, figure in figures:
                yield family(
                    f"{prefix}_{name}", meaning, labels, [(of, figure(part)) for of, part in parts]
                )


STREAMING: TierFigures[StageStreaming] = TierFigures(
    now=(
        (
            "resident_bytes",
            "Weights of a streaming stage that stay in memory.",
            lambda part: part.resident_bytes,
        ),
        (
            "streamed_bytes",
            "Weights that each sweep reads from the disk.",
            lambda part: part.streamed_bytes,
        ),
    ),
    since=(
        ("read_bytes", "Weights that were read from the disk.", lambda part: part.read_bytes),
        ("wait_seconds", "How long steps waited for weights.", lambda part: part.waited_s),
    ),
)
EXPERTS: TierFigures[StageExperts] = TierFigures(
    now=(
        (
            "cached_bytes",
            "Experts in memory, of a stage with experts on its disk.",
            lambda part: part.cached_bytes,
        ),
        ("room_bytes", "Limit of those in memory.", lambda part: part.room_bytes),
        ("size_bytes", "All experts of such a stage.", lambda part: part.total_bytes),
    ),
    since=(
        ("hits", "Experts that steps needed and that were in memory.", lambda part: part.hits),
        ("misses", "Experts that steps needed and that were not.", lambda part: part.misses),
        ("read_bytes", "Experts that were read from the disk.", lambda part: part.read_bytes),
        ("wait_seconds", "How long steps waited for experts.", lambda part: part.waited_s),
    ),
)
SWAP: TierFigures[StageSwap] = TierFigures(
    now=(
        (
            "swap_capacity_bytes",
            "KV that a stage may keep aside.",
            lambda part: part.capacity_bytes,
        ),
        ("swap_kept_bytes", "KV that it keeps aside now.", lambda part: part.kept_bytes),
    ),
    since=(
        ("swaps_out", "Requests whose KV was put aside.", lambda part: part.swapped_out),
        ("swaps_in", "Requests whose KV was swapped in again.", lambda part: part.swapped_in),
    ),
)
