"""Tokens as the coordinator keeps them, and what makes one good. Pure: times and secrets come in as values."""

from __future__ import annotations

import hmac
from collections import deque
from dataclasses import dataclass, replace
from hashlib import sha256

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import Principal

SHORTEST_TTL_S = 10.0
LONGEST_TTL_S = 7 * 86400.0
MOST_TOKENS = 4096
MOST_GUESSES = 5
"""Wrong secrets for a token before it is destroyed; a secret has 128 bits, so nobody guesses one."""
ATTEMPTS_PER_MINUTE = 120
"""Of all joiners together."""


@dataclass(frozen=True, slots=True)
class Token:
    """`digest` is the sha256 of its secret, `key_digest` that of the key it was traded for ("" before). `expires_at` is
    in seconds of the wall clock."""

    token_id: str
    digest: str
    principal: Principal
    expires_at: float
    key_digest: str = ""
    guesses: int = 0


def check_ttl(ttl_s: float) -> float:
    """Raises InvalidArgumentError for a life that is no use, or too long to be forgotten about."""
    if not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:  # also NaN
        raise InvalidArgumentError("ttl: a token lives from 10 seconds to 7 days", field="ttl", reason="TTL")
    return ttl_s


def digest_of(secret: bytes) -> str:
    return sha256(secret).hexdigest()


def redeemed(token: Token | None, secret: bytes, key_digest: str, now: float) -> Token:
    """The token once it is traded for a certificate of a key.

    Raises DeniedError. Whoever does not know the secret hears nothing else than whoever made a token up.
    """
    if token is None or not hmac.compare_digest(token.digest, digest_of(secret)):
        raise DeniedError("the token is not known here; it may have expired", field="token", reason="TOKEN")
    if token.expires_at <= now:
        raise DeniedError(
            "the token has expired; make another with edgectl token create", field="token", reason="TOKEN_EXPIRED"
        )
    if token.key_digest not in ("", key_digest):
        raise DeniedError(
            "the token was used already, by another process; make another with edgectl token create",
            field="token",
            reason="TOKEN_USED",
        )
    return replace(token, key_digest=key_digest)


def guessed(token: Token) -> Token | None:
    """The token after somebody came with a wrong secret; None once there were too many."""
    return replace(token, guesses=token.guesses + 1) if token.guesses + 1 < MOST_GUESSES else None


class Attempts:
    """How many tried to join within the last minute."""

    def __init__(self, most: int = ATTEMPTS_PER_MINUTE) -> None:
        self._most = most
        self._times: deque[float] = deque()

    def count(self, now: float) -> None:
        """One more at `now`, in monotonic seconds. Raises ResourceExhaustedError where there were too many."""
        while self._times and now - self._times[0] >= 60.0:
            self._times.popleft()
        if len(self._times) >= self._most:
            wait_s = max(0.1, 60.0 - (now - self._times[0]))
            raise ResourceExhaustedError(
                f"more than {self._most} attempts to join within a minute; try again",
                reason="RATE",
                retry_after_s=wait_s,
            )
        self._times.append(now)
