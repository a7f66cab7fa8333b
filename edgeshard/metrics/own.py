"""Figures of a daemon's own machine and certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from edgeshard.domain.nodes.condition import Condition
from edgeshard.metrics.families import gauge


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
        yield gauge("edgeshard_disk_write_bytes_per_second", written, (), [((), condition.disk_write_bps)])
        if condition.certificate_ends_s:
            ends, meaning = [((), condition.certificate_ends_s)], "When this daemon's certificate ends."
            yield gauge("edgeshard_certificate_expiry_timestamp_seconds", meaning, (), ends)
