"""Counts of figures by size. A figure costs a search in a short list and two additions, so tokens
are counted too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest

LATENCY_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)
"""Bounds for a request or a part of it, in seconds."""
STEP_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Bounds for one step or one token, in seconds."""


class Histogram:
    """Counts of the figures up to each of `bounds`, which ascend. The sum of all figures is
    exact."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    def counts(self) -> tuple[int, ...]:
        """How many figures each bucket has, the last one those beyond all bounds."""
        return tuple(self._counts)

    def quantile(self, share: float, before: Sequence[int] = ()) -> float | None:
        """The figure that `share` (0 to 1) of all figures do not exceed; None without figures. With
        `before`, which are former `counts`, it covers only figures added since.

        A bucket's figures are taken as spread evenly over it, the first one's from 0 on, so that
        the error is less than the bucket's width. For a figure beyond the last bound that bound is
        returned, which is too little.
        """
        counts = [now - then for now, then in zip_longest(self._counts, before, fillvalue=0)]
        rank = share * sum(counts)
        reached = 0
        low = 0.0
        if not any(counts):
            return None
        for bound, count in zip(self._bounds, counts, strict=False):
            if count and reached + count >= rank:
                # rounding may pass it
                return min(bound, low + (bound - low) * (rank - reached) / count)
            reached, low = reached + count, bound
        return low

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound as Prometheus writes it, with the count of figures up to it; the last one
        counts all."""
        pairs, reached = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            reached += count
            pairs.append((bound, float(reached)))
        return pairs
