"""The amount used over a time is at most the rate's, plus one bucket and the last request; waiting
ends every debt."""

from __future__ import annotations

from edgeshard_coordinator.core.values.token_bucket import TokenBucket
from hypothesis import given
from hypothesis import strategies as st

RATES = st.floats(0.01, 1e6)
AMOUNTS = st.integers(1, 1_000_000)
STEPS = st.lists(st.tuples(st.floats(0, 1000), AMOUNTS), min_size=1, max_size=50)


@given(RATES, STEPS)
def test_no_more_is_used_than_the_rate_brings(rate: float, steps: list[tuple[float, int]]) -> None:
    """By one that asks as often as it likes and uses something only while it is in no debt."""
    bucket = TokenBucket(rate, 60.0)
    now = 0.0
    used = 0.0
    last = 0
    for pause_s, amount in steps:
        now += pause_s
        if bucket.debt_s(now) == 0:
            bucket = bucket.charged(amount, now)
            used = used + amount
            last = amount
            assert used - last <= rate * (60.0 + now) * (1 + 1e-9)


@given(RATES, STEPS)
def test_a_debt_is_over_when_it_says_and_not_before(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(rate, 60.0), 0.0
    for pause_s, amount in steps:
        now += pause_s
        bucket = bucket.charged(amount, now)
    debt_s = bucket.debt_s(now)
    slack = 1e-9 * (1 + now + debt_s)
    assert bucket.debt_s(now + debt_s) <= slack
    assert debt_s == 0 or bucket.debt_s(now + debt_s / 2) > 0
    assert not bucket.is_full(now) and bucket.is_full(now + debt_s + 60.0 + slack)


@given(RATES, AMOUNTS, st.floats(0, 1e6))
def test_an_idle_bucket_holds_no_more_than_is_said(rate: float, amount: int, idle_s: float) -> None:
    """However long nothing was used."""
    spent = TokenBucket(rate, 60.0).charged(amount, 0.0)
    later = max(idle_s, spent.full_at)
    assert spent.charged(1, later).full_at == TokenBucket(rate, 60.0).charged(1, later).full_at


def test_a_minutes_worth_may_be_used_at_once() -> None:
    bucket = TokenBucket(10.0, 60.0)
    assert bucket.charged(600, 5.0).debt_s(5.0) == 0
    assert bucket.charged(620, 5.0).debt_s(5.0) == 2.0
