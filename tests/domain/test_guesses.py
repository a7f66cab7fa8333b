"""Histograms of guesses, by numbers of made and right ones: the latest weigh most, and no node's
figures overflow them.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.deployments.guesses import MOST_GUESSES, NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.traffic import LATEST, NO_TRAFFIC, Traffic
from edgeshard.domain.errors import InvalidArgumentError

PLACES = st.integers(0, MOST_GUESSES).flatmap(
    lambda guessed: st.tuples(st.just(guessed), st.integers(0, guessed))
)
COUNTED = st.lists(PLACES, max_size=50).map(Counter)


@given(COUNTED)
def test_a_histogram_has_each_kind_of_step_in_its_place(counted: Counter[tuple[int, int]]) -> None:
    found = GuessCounts.of(counted)
    assert {(guessed, right): count for guessed, right, count in found} == dict(counted)
    assert found.guessed == sum(guessed * count for (guessed, _), count in counted.items())
    assert found.right == sum(right * count for (_, right), count in counted.items())
    assert found.tokens == sum((1 + right) * count for (_, right), count in counted.items())
    for (guessed, right), count in counted.items():
        assert found.steps[guessed * (guessed + 1) // 2 + right] == count
    found.check()


@given(COUNTED, COUNTED)
def test_several_together_are_all_their_steps(
    one: Counter[tuple[int, int]], other: Counter[tuple[int, int]]
) -> None:
    assert GuessCounts.of_all([GuessCounts.of(one), GuessCounts.of(other)]) == GuessCounts.of(
        one + other
    )


def test_the_latest_requests_weigh_most_and_those_without_steps_nothing() -> None:
    traffic, kept = NO_TRAFFIC, 1 - 1 / LATEST
    for right in (0, 4):
        for _ in range(LATEST):
            traffic = traffic.after(10, 20, guesses=GuessCounts.of({(4, right): 3}))
    weights = {(guessed, right): count for guessed, right, count in traffic.guesses}
    fresh = 3 * sum(kept**age for age in range(LATEST))
    assert weights == pytest.approx({(4, 0): fresh * kept**LATEST, (4, 4): fresh})
    assert traffic.after(10, 20).guesses == traffic.guesses
    assert Traffic.of_all([traffic, traffic]).guesses.guessed == pytest.approx(
        2 * traffic.guesses.guessed
    )


@pytest.mark.parametrize("steps", [(-1.0,), (math.nan,), (math.inf,), (2.0**33,)])
def test_steps_that_cannot_be_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        GuessCounts(steps).check()
    assert refused.value.field == "steps"


def test_sums_stay_what_can_be_read_again() -> None:
    most = GuessCounts((0.0, 0.0, float(1 << 32)))
    whole = NO_GUESSES
    for _ in range(3):
        whole = whole.after(most, 1.0)
    assert whole == most
    whole.check()
