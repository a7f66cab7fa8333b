"""The order of questions: shares, preemption, and refusals."""

from __future__ import annotations

import random

import pytest

from edgeshard.chat.turns import Turns
from edgeshard.domain.errors import ResourceExhaustedError


def turns(most: int = 100, most_bytes: int = 1 << 20) -> Turns[str]:
    return Turns(most, most_bytes)


def test_one_who_comes_anew_waits_for_one_answer_of_another() -> None:
    asked = turns()
    for number in range(12):
        asked.put("flood", 1000, f"flood {number}")
    assert asked.take() == ("flood", "flood 0")
    asked.put("honest", 1, "honest")
    asked.charge("flood", 2.0)
    assert asked.take() == ("honest", "honest")


def test_shares_are_equal_in_cost_and_not_in_number() -> None:
    """Random loads of three identities that always have waiting requests: no identity is ahead by
    more than one answer.
    """
    for seed in range(50):
        chance = random.Random(seed)
        asked = turns()
        had = {"a": 0.0, "b": 0.0, "c": 0.0}
        costs = {"a": 1.0, "b": 0.05, "c": 0.3}
        for who in had:
            asked.put(who, 1, who)
        for _ in range(500):
            taken = asked.take()
            assert taken is not None
            who, _ = taken
            asked.put(who, 1, who)
            cost = costs[who] * chance.random()
            had[who] += cost
            asked.charge(who, cost)
        assert max(had.values()) - min(had.values()) <= max(costs.values())


def test_one_that_may_not_have_its_turn_is_passed_over() -> None:
    asked = turns()
    for who in ("a", "b"):
        asked.put(who, 1, who)
    assert asked.take(lambda who: who != "a") == ("b", "b")
    assert asked.take(lambda who: who != "a") is None and asked.waiting() == ["a"]
    assert asked.take() == ("a", "a") and asked.waiting() == []


def test_whoever_has_the_most_gives_way() -> None:
    asked = turns(most=4)
    for item in ("flood 0", "flood 1", "flood 2"):
        asked.put("flood", 1, item)
    asked.put("honest", 1, "honest 0")
    assert asked.put("honest", 1, "honest 1") == ["flood 2"], "its newest"
    with pytest.raises(ResourceExhaustedError) as caught:
        asked.put("flood", 1, "flood 3")
    assert caught.value.retry_after_s


def test_bytes_count_as_places_do() -> None:
    asked = turns(most_bytes=100)
    for item in ("flood 0", "flood 1"):
        asked.put("flood", 45, item)
    assert asked.put("honest", 30, "honest") == ["flood 1"]
    with pytest.raises(ResourceExhaustedError):
        asked.put("flood", 45, "flood 2")
    with pytest.raises(ResourceExhaustedError):
        turns(most_bytes=100).put("one", 101, "more than all of it")


def test_who_leaves_is_forgotten_with_its_bytes() -> None:
    asked = turns(most_bytes=100)
    asked.put("one", 90, "first")
    assert asked.remove("one", "first") and not asked.remove("one", "first")
    asked.put("one", 90, "second")
    assert asked.drain() == ["second"] and len(asked) == 0
    assert asked.take() is None
    asked.put("one", 90, "third")
    assert asked.take() == ("one", "third")
    asked.charge("one", 1.0)
    assert not asked._lines, "an identity that asks for nothing takes no memory"
