"""Waiting times of the requests of the last minute. Pure: times are passed in as values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from edgeshard.metrics.histogram import Histogram
from edgeshard_coordinator.control.requests.request_meter import DeploymentCounts

RECENT_S = 60.0
KEPT_EVERY_S = 5.0
MADE_EVERY_S = 1.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_Kept = tuple[tuple[int, ...], tuple[int, ...]]
_NOTHING: _Kept = ((), ())


class Recent:
    """Percentiles of the times to the first token and between tokens, by deployment, of the last
    `RECENT_S` seconds, or since there are viewers if that is less."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, dict[str, _Kept]]] = deque()
        self._made_s = float("-inf")
        self._made: dict[str, dict[str, Any]] = {}

    def of(self, now: float, counts: Mapping[str, DeploymentCounts]) -> Mapping[str, dict[str, Any]]:
        """Those of a deployment that had no token are {}."""
        if now - self._made_s < MADE_EVERY_S and self._made.keys() == counts.keys():
            return self._made
        while self._kept and self._kept[0][0] < now - RECENT_S - KEPT_EVERY_S:
            self._kept.popleft()
        if not self._kept or self._kept[-1][0] <= now - KEPT_EVERY_S:
            self._kept.append((now, {name: _kept(one) for name, one in counts.items()}))
        former = self._kept[0][1]
        self._made_s = now
        self._made = {name: _recent(one, former.get(name, _NOTHING)) for name, one in counts.items()}
        return self._made


def percentiles(figures: Histogram, before: tuple[int, ...] = ()) -> dict[str, float] | None:
    """Percentiles of all figures, or of those since `before`, in their unit; None if there are none."""
    quantiles = {name: figures.quantile(share, before) for name, share in SHARES.items()}
    return {name: round(value, 5) for name, value in quantiles.items() if value is not None} or None


def _kept(counts: DeploymentCounts) -> _Kept:
    return counts.first_token.counts(), counts.between_tokens.counts()


def _recent(counts: DeploymentCounts, former: _Kept) -> dict[str, Any]:
    if any(now < then for now, then in zip(counts.first_token.counts(), former[0], strict=False)):
        former = _NOTHING  # another deployment of that name
    first = percentiles(counts.first_token, former[0])
    between = percentiles(counts.between_tokens, former[1])
    return {name: value for name, value in (("first_token", first), ("between_tokens", between)) if value is not None}
