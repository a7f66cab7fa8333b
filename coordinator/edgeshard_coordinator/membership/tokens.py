"""Tokens as the coordinator stores them, and their check. Pure: times and secrets are passed in as
values."""

from __future__ import annotations

import hmac
import ipaddress
from collections import deque
from dataclasses import dataclass, replace
from hashlib import sha256

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import OpenToken, Principal

SHORTEST_TTL_S = 10.0
LONGEST_TTL_S = 7 * 86400.0
MOST_TOKENS = 4096
FAILURES_PER_MINUTE = 20
"""Attempts to join from one address that may fail. They do not count against the token that they
name. A secret has 128 bits and cannot be guessed, and an attacker who could destroy a token by
guesses would lock out its owner."""
MOST_ADDRESSES = 4096
"""Addresses that are remembered for their failures."""
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """`digest` is the sha256 of its secret, `key_digest` the sha256 of the key it was traded for
    ("" before). Times are in seconds of the wall clock. `creator` is the operator's name; it is ""
    and `created_at` is 0 if an older version created the token."""

    token_id: str
    digest: str
    principal: Principal
    expires_at: float
    key_digest: str = ""
    created_at: float = 0.0
    creator: str = ""

    def without_secret(self) -> OpenToken:
        principal = self.principal
        times = self.created_at, self.expires_at
        return OpenToken(self.token_id, principal.role, principal.id, *times, self.creator)


def check_ttl(ttl_s: float) -> float:
    """Raises InvalidArgumentError for a life that is no use, or too long to be forgotten about."""
    if not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:  # also NaN
        raise InvalidArgumentError(
            "ttl: a token lives from 10 seconds to 7 days", field="ttl", reason="TTL"
        )
    return ttl_s


def digest_of(secret: bytes) -> str:
    return sha256(secret).hexdigest()


def redeemed(token: TokenRecord | None, secret: bytes, key_digest: str, now: float) -> TokenRecord:
    """The token once it is traded for a certificate of a key.

    Raises DeniedError, with the same words for a wrong secret and for a token that is made up.
    """
    if token is None or not hmac.compare_digest(token.digest, digest_of(secret)):
        raise DeniedError(
            "the token is unknown here; it may have expired: make another with edgectl token "
            "create",
            field="token",
            reason="TOKEN",
        )
    if token.expires_at <= now:
        raise DeniedError(
            "the token has expired; make another with edgectl token create",
            field="token",
            reason="TOKEN_EXPIRED",
        )
    if token.key_digest not in ("", key_digest):
        raise DeniedError(
            "the token was used already, by another process; make another with edgectl token "
            "create",
            field="token",
            reason="TOKEN_USED",
        )
    return replace(token, key_digest=key_digest)


def subscriber_of(address: str) -> str:
    """The subscriber of an address, given as `host:port` or `[host]:port`: an IPv4 host, or the /64
    of an IPv6 host, since one subscriber has all its addresses. A text that is no address counts as
    one."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


class Failures:
    """The failures of each subscriber's joiners within the last minute, or whatever else `subject`
    names. Times are in monotonic seconds."""

    def __init__(
        self,
        most: int = FAILURES_PER_MINUTE,
        most_addresses: int = MOST_ADDRESSES,
        subject: str = "attempts to join from your address failed",
    ) -> None:
        self._most = most
        self._most_addresses = most_addresses
        self._subject = subject
        self._times: dict[str, deque[float]] = {}
        """The times by subscriber, the one that failed last at the end."""

    def __len__(self) -> int:
        return len(self._times)

    def check(self, subscriber: str, now: float) -> None:
        """Raise ResourceExhaustedError if there were too many; this call does not count as
        another."""
        times = self._times.get(subscriber, deque())
        while times and now - times[0] >= _WINDOW_S:
            times.popleft()
        if len(times) >= self._most:
            raise ResourceExhaustedError(
                f"{self._most} {self._subject} within a minute; try again",
                reason="RATE",
                retry_after_s=max(0.1, _WINDOW_S - (now - times[0])),
            )

    def count(self, subscriber: str, now: float) -> None:
        """Count one more. If too many subscribers are remembered, the one with the oldest last
        failure is forgotten."""
        times = self._times.pop(subscriber, None) or deque()
        times.append(now)
        self._times[subscriber] = times
        oldest = next(iter(self._times))
        if len(self._times) > self._most_addresses or now - self._times[oldest][-1] >= _WINDOW_S:
            del self._times[oldest]
