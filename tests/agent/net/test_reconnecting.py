"""The pauses and the lines of an agent whose coordinator is away."""

from __future__ import annotations

import pytest
from edgeshard_agent.net.streams import (
    MAX_PAUSE_S,
    MAX_RETRY_S,
    PATIENCE_S,
    QUIET_S,
    STEADY_S,
    Reconnecting,
)

DAY_S = 86_400.0


def test_a_day_without_a_coordinator_has_few_lines() -> None:
    reconnecting = Reconnecting()
    now = 0.0
    lines = 0
    tries = 0
    while now < DAY_S:
        now += reconnecting.failed(now)
        tries += 1
        lines += reconnecting.is_news("UNAVAILABLE", f"no connection to port {tries}", now)
    assert DAY_S / (2 * QUIET_S) < lines <= DAY_S / QUIET_S + 1
    assert tries < PATIENCE_S / MAX_RETRY_S + DAY_S / MAX_PAUSE_S + 20


def test_pauses_stay_short_for_five_minutes_and_then_grow() -> None:
    reconnecting = Reconnecting()
    now, longest_s = 0.0, 0.0
    while now < PATIENCE_S:
        pause_s = reconnecting.failed(now)
        longest_s = max(longest_s, pause_s)
        now += pause_s
    assert longest_s == MAX_RETRY_S
    pauses = [reconnecting.failed(now) for _ in range(9)]
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE_S


def test_each_new_reason_is_logged_at_once_and_a_number_makes_none() -> None:
    reconnecting = Reconnecting()
    assert reconnecting.is_news("UNAVAILABLE", "retry after 3 s", 1.0)
    assert not reconnecting.is_news("UNAVAILABLE", "retry after 14 s", 2.0)
    assert reconnecting.is_news("UNAUTHENTICATED", "retry after 3 s", 3.0)
    assert not reconnecting.is_news("UNAVAILABLE", "retry after 3 s", 3.0 + QUIET_S - 1)
    assert reconnecting.is_news("UNAVAILABLE", "retry after 3 s", 3.0 + QUIET_S)


def test_reasons_without_end_are_no_news() -> None:
    reconnecting = Reconnecting()
    said = sum(reconnecting.is_news("UNAVAILABLE", "x" * number, 1.0) for number in range(1000))
    assert said <= 20


def test_a_line_has_the_failures_since_the_last_one() -> None:
    reconnecting = Reconnecting()
    for now in (1.0, 2.0, 3.0):
        reconnecting.failed(now)
    assert (reconnecting.told(), reconnecting.told()) == (3, 0)


@pytest.mark.parametrize(("lasted_s", "is_news"), [(STEADY_S, True), (STEADY_S / 2, False)])
def test_a_connection_that_lasts_ends_the_absence(lasted_s: float, is_news: bool) -> None:
    reconnecting = Reconnecting()
    now = 1.0
    for _ in range(3):
        reconnecting.failed(now)
        reconnecting.is_news("UNAVAILABLE", "", now)
    assert reconnecting.came_back(now)
    now += lasted_s
    reconnecting.failed(now)
    assert reconnecting.is_news("UNAVAILABLE", "", now) == is_news
    assert reconnecting.came_back(now) == is_news
