"""The conditions of a valid token, and the number of attempts."""

from __future__ import annotations

import pytest
from edgeshard_coordinator.membership.tokens import (
    Failures,
    TokenRecord,
    check_ttl,
    digest_of,
    redeemed,
    subscriber_of,
)

from edgeshard.domain.errors import DeniedError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import Principal, Role

SECRET = b"s" * 32
TOKEN = TokenRecord("t", digest_of(SECRET), Principal("mill", Role.AGENT, "b"), expires_at=100.0)


def test_a_token_is_good_for_one_key_until_it_expires() -> None:
    used = redeemed(TOKEN, SECRET, "key", 99.0)
    assert used.key_digest == "key" and redeemed(used, SECRET, "key", 99.9) == used
    for token, key, now, reason in [
        (used, "other", 99.0, "TOKEN_USED"),
        (TOKEN, "key", 100.0, "TOKEN_EXPIRED"),
    ]:
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


def test_failures_are_counted_over_a_minute_and_by_address() -> None:
    failures = Failures(3)
    for now in (0.0, 10.0, 20.0):
        failures.check("a", now)
        failures.count("a", now)
    for now in (20.0, 30.0, 59.0):  # to be refused is no further failure
        with pytest.raises(ResourceExhaustedError) as refusal:
            failures.check("a", now)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    failures.check("b", 59.0)
    failures.check("a", 60.0)


def test_addresses_without_end_take_no_memory() -> None:
    failures = Failures(3, most_addresses=10)
    for number in range(1000):
        failures.count(f"a{number}", number / 1000)
    assert len(failures) == 10
    for number in range(20):
        failures.count("b", 100.0 + number)
    assert len(failures) == 1, "what is a minute old is forgotten"


@pytest.mark.parametrize(
    ("address", "subscriber"),
    [
        ("10.0.0.1:5", "10.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:5", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::ffff]:6", "2001:db8:1:2::/64"),
        ("[2001:db8:1:3::1]:5", "2001:db8:1:3::/64"),
        ("[fe80::1%eth0]:5", "fe80::/64"),
        ("[::ffff:10.0.0.1]:5", "10.0.0.1"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one(address: str, subscriber: str) -> None:
    assert subscriber_of(address) == subscriber


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 9.9, 8 * 86400.0, float("nan"), float("inf")])
def test_lives_that_are_no_use(ttl_s: float) -> None:
    with pytest.raises(InvalidArgumentError):
        check_ttl(ttl_s)
