"""What makes a token good, and how many may try."""

from __future__ import annotations

import pytest
from edgeshard_coordinator.membership.tokens import (
    MOST_GUESSES,
    Attempts,
    Token,
    check_ttl,
    digest_of,
    guessed,
    redeemed,
)

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import Principal, Role

SECRET = b"s" * 32
TOKEN = Token("t", digest_of(SECRET), Principal("mill", Role.AGENT, "b"), expires_at=100.0)


def test_a_token_is_good_for_one_key_until_it_expires() -> None:
    used = redeemed(TOKEN, SECRET, "key", 99.0)
    assert used.key_digest == "key" and redeemed(used, SECRET, "key", 99.9) == used
    for token, key, now, reason in [(used, "other", 99.0, "TOKEN_USED"), (TOKEN, "key", 100.0, "TOKEN_EXPIRED")]:
        with pytest.raises(DeniedError) as refusal:
            redeemed(token, SECRET, key, now)
        assert refusal.value.reason == reason


def test_without_the_secret_nothing_is_said_of_a_token() -> None:
    """Not whether there is one, nor whether it was used or has expired."""
    used = redeemed(TOKEN, SECRET, "key", 0.0)
    said = set()
    for token, now in [(None, 0.0), (TOKEN, 0.0), (TOKEN, 200.0), (used, 0.0)]:
        with pytest.raises(DeniedError) as refusal:
            redeemed(token, b"x" * 32, "key", now)
        said.add((refusal.value.reason, refusal.value.message))
    assert len(said) == 1


def test_wrong_secrets_destroy_a_token() -> None:
    token: Token | None = TOKEN
    for _ in range(MOST_GUESSES):
        assert token is not None
        token = guessed(token)
    assert token is None


def test_attempts_are_counted_over_a_minute() -> None:
    attempts = Attempts(3)
    for now in (0.0, 10.0, 20.0):
        attempts.count(now)
    with pytest.raises(ResourceExhaustedError) as refusal:
        attempts.count(59.0)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    attempts.count(60.0)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 9.9, 8 * 86400.0, float("nan"), float("inf")])
def test_lives_that_are_no_use(ttl_s: float) -> None:
    with pytest.raises(InvalidArgumentError):
        check_ttl(ttl_s)
