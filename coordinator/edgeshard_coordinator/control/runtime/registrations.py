"""The rate at which a node may register: each registration is a write to the disk."""

from __future__ import annotations

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import NodeName
from edgeshard_coordinator.core.values.token_bucket import TokenBucket

RATE = 1.0
"""Registrations of one node a second, in the long run. A node registers when it starts and when it reconnects."""
BURST_S = 20.0
MAX_NAMES = 4096
"""Names that are remembered, those seen first go first; without certificates anyone may invent some."""


class Registrations:
    """The registrations of the last seconds, by the node's name."""

    def __init__(self) -> None:
        self._buckets: dict[NodeName, TokenBucket] = {}

    def take(self, name: NodeName, now: float) -> None:
        """Count a registration at `now`. Raises ResourceExhaustedError naming `name` for one too many."""
        bucket = self._buckets.get(name, TokenBucket(RATE, BURST_S))
        debt_s = bucket.debt_s(now)
        if debt_s > 0:
            raise ResourceExhaustedError(
                f"name: node {name} registers too often; register again after {debt_s:.1f} s",
                field="name",
                reason="TOO_MANY_REGISTRATIONS",
                retry_after_s=debt_s,
            )
        if len(self._buckets) >= MAX_NAMES:
            busy = {other_name: other for other_name, other in self._buckets.items() if not other.is_full(now)}
            newest = list(busy.items())[-(MAX_NAMES // 2) :]
            self._buckets = dict(newest)
        self._buckets[name] = bucket.charged(1.0, now)
