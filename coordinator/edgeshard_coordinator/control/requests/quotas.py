"""The quota of every identity: its requests that run or wait, and the tokens that it used
lately."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgeshard.domain.errors import DeniedError, ResourceExhaustedError
from edgeshard.domain.identity import shown_identity
from edgeshard.domain.ids import DeploymentName
from edgeshard_coordinator.core.values.quotas import QUEUED_OF_ONE, Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord
from edgeshard_coordinator.core.values.token_bucket import TokenBucket

BURST_S = 60.0
"""An identity may use the tokens of this many seconds at once."""


@dataclass(eq=False)
class QuotaBook:
    """The tokens that each identity used; an identity without recent usage takes no memory.

    `now` returns seconds of a steady clock. `of_key` returns the limits of an API key's identity,
    None if the identity is another.
    """

    _quotas: Quotas
    _now: Callable[[], float]
    _of_key: Callable[[str], Quota | None] = lambda identity: None
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def change(self, quotas: Quotas) -> None:
        """Take up the quotas of another file. The tokens that an identity used still count, against
        its new limit."""
        self._quotas = quotas
        now = self._now()
        buckets = {}
        for identity, bucket in self._buckets.items():
            per_minute = self.of(identity).tokens_per_minute
            if per_minute is not None and not bucket.is_full(now):
                used = (bucket.full_at - now) * bucket.rate
                buckets[identity] = TokenBucket(per_minute / 60, BURST_S).charged(used, now)
        self._buckets = buckets

    def check(
        self,
        identity: str,
        priority: int,
        records: Sequence[DeploymentRecord],
        deployments: Sequence[DeploymentName],
    ) -> None:
        """Raise for a request beyond the share of its identity, which has one running or waiting at
        each deployment of `deployments`. A resumed request counts, too. `records` are all replicas
        of the requested name, whose shares add up.

        Raises DeniedError naming `priority`, and ResourceExhaustedError naming `requests`, with
        reason QUOTA.
        """
        quota, who = self.of(identity), _shown(identity)
        highest = self._quotas.max_priority_of(identity)
        if priority > highest:
            raise DeniedError(
                f"priority {priority} is above {highest}, the limit of {who}: use a lower "
                "priority, or have "
                "the operator raise max_priority in the coordinator's quotas",
                field="priority",
                reason="PRIORITY",
            )
        self._check_count(identity, len(deployments))
        # In plaintext everyone is one identity, so no other identity would use the rest.
        share = sum(record.running_requests for record in records) * (1 + QUEUED_OF_ONE)
        if (
            quota.requests is None
            and identity
            and sum(deployments.count(record.name) for record in records) >= share
        ):
            name = records[0].served_name
            raise _too_many(
                f"{who} has {share} requests running or waiting at deployment {name}, its share"
            )

    def check_place(self, identity: str, at_once: int) -> None:
        """Raise ResourceExhaustedError as `check` and `check_debt` do, before the request itself is
        known: `at_once` requests of this identity run, wait or are being read."""
        self._check_count(identity, at_once)
        self.check_debt(identity)

    def check_debt(self, identity: str) -> None:
        """Raise ResourceExhaustedError naming `tokens_per_minute`, with reason QUOTA, for an
        identity that used too many."""
        debt_s = self._debt_s(identity)
        if debt_s > 0:
            quota, who = self.of(identity), _shown(identity)
            raise ResourceExhaustedError(
                f"{who} has used more than its quota of {quota.tokens_per_minute} "
                "tokens_per_minute; try again in "
                f"{debt_s:g} s, or have the operator raise tokens_per_minute in the coordinator's "
                "quotas",
                field="tokens_per_minute",
                reason="QUOTA",
                retry_after_s=debt_s,
            )

    def charge(self, identity: str, tokens: int) -> None:
        """Count tokens that an identity used. The request continues, and the next one may be
        refused."""
        per_minute = self.of(identity).tokens_per_minute
        if per_minute is None:
            return
        now, bucket = self._now(), self._buckets.get(identity)
        if bucket is None:
            self._buckets = {
                who: other for who, other in self._buckets.items() if not other.is_full(now)
            }
            bucket = TokenBucket(per_minute / 60, BURST_S)
        self._buckets[identity] = bucket.charged(tokens, now)

    def _check_count(self, identity: str, count: int) -> None:
        most = self.of(identity).requests
        if most is not None and count >= most:
            raise _too_many(
                f"{_shown(identity)} has {count} requests running or waiting, as many as its quota "
                "of requests"
            )

    def of(self, identity: str) -> Quota:
        """The limits of the quotas' file, overruled by those that an API key has of its own."""
        quota, own = self._quotas.of(identity), self._of_key(identity)
        if own is None:
            return quota
        requests = quota.requests if own.requests is None else own.requests
        per_minute = (
            quota.tokens_per_minute if own.tokens_per_minute is None else own.tokens_per_minute
        )
        return Quota(requests, per_minute, quota.max_priority)

    def _debt_s(self, identity: str) -> float:
        bucket = self._buckets.get(identity)
        return 0.0 if bucket is None else math.ceil(10 * bucket.debt_s(self._now())) / 10


def _shown(identity: str) -> str:
    return shown_identity(identity) or "everyone together"


def _too_many(what: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"{what}: wait until one ends, or have the operator raise requests in the coordinator's "
        "quotas",
        field="requests",
        reason="QUOTA",
        retry_after_s=1.0,
    )
