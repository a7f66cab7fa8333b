"""What is said of a mixture's experts on the disk: an agent of its own stages, the coordinator of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from edgeshard.domain.device import StageExperts
from edgeshard.metrics.families import counter, gauge

_Told = tuple[tuple[str, str, Callable[[StageExperts], float]], ...]
_GAUGES: _Told = (
    ("cached_bytes", "Experts in memory, of a stage with experts on its disk.", lambda found: found.cached_bytes),
    ("room_bytes", "What those in memory may take.", lambda found: found.room_bytes),
    ("size_bytes", "All experts of such a stage.", lambda found: found.total_bytes),
)
_COUNTERS: _Told = (
    ("hits", "Experts that steps needed and that were in memory.", lambda found: found.hits),
    ("misses", "Experts that steps needed and that were not.", lambda found: found.misses),
    ("read_bytes", "Experts that were read from the disk.", lambda found: found.read_bytes),
    ("wait_seconds", "How long steps waited for experts.", lambda found: found.waited_s),
)


def expert_metrics(
    prefix: str, labels: Sequence[str], told: Sequence[tuple[Sequence[str], StageExperts]]
) -> Iterator[Metric]:
    """Metrics whose names begin with `prefix`, of stages by the values of their `labels`."""
    for name, meaning, figure in _GAUGES:
        yield gauge(f"{prefix}_{name}", meaning, labels, [(of, figure(found)) for of, found in told])
    for name, meaning, figure in _COUNTERS:
        yield counter(f"{prefix}_{name}", meaning, labels, [(of, figure(found)) for of, found in told])
