"""Figures of stages that do not hold all in memory: an agent exports its own stages', the
coordinator all stages'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import Metric

from edgeshard.domain.nodes.device import StageExperts, StageStreaming, StageSwap
from edgeshard.metrics.families import counter, gauge

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
                yield family(f"{prefix}_{name}", meaning, labels, [(of, figure(part)) for of, part in parts])


STREAMING: TierFigures[StageStreaming] = TierFigures(
    now=(
        ("resident_bytes", "Weights of a streaming stage that stay in memory.", lambda part: part.resident_bytes),
        ("streamed_bytes", "Weights that each sweep reads from the disk.", lambda part: part.streamed_bytes),
    ),
    since=(
        ("read_bytes", "Weights that were read from the disk.", lambda part: part.read_bytes),
        ("wait_seconds", "How long steps waited for weights.", lambda part: part.waited_s),
    ),
)
EXPERTS: TierFigures[StageExperts] = TierFigures(
    now=(
        ("cached_bytes", "Experts in memory, of a stage with experts on its disk.", lambda part: part.cached_bytes),
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
        ("swap_capacity_bytes", "KV that a stage may keep aside.", lambda part: part.capacity_bytes),
        ("swap_kept_bytes", "KV that it keeps aside now.", lambda part: part.kept_bytes),
    ),
    since=(
        ("swaps_out", "Requests whose KV was put aside.", lambda part: part.swapped_out),
        ("swaps_in", "Requests whose KV was swapped in again.", lambda part: part.swapped_in),
    ),
)
