"""The lengths of a deployment's requests: exact means, a small histogram, and the latest weigh
most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.deployments.traffic import LATEST, NO_TRAFFIC, Lengths, Traffic

TOKENS = st.integers(1, 200_000)


def lengths_of(*tokens: int, kept: float = 1.0) -> Lengths:
    found = Lengths()
    for count in tokens:
        found = found.after(count, kept)
    return found


@given(st.lists(TOKENS, min_size=1, max_size=200))
def test_the_mean_is_that_of_all_lengths_each_weighing_less_than_the_next(
    tokens: list[int],
) -> None:
    kept = 1 - 1 / LATEST
    traffic = NO_TRAFFIC
    for count in tokens:
        traffic = traffic.after(count, 2 * count, 3 * count)
    weights = [kept**age for age in reversed(range(len(tokens)))]
    mean = sum(weight * count for weight, count in zip(weights, tokens, strict=True)) / sum(weights)
    assert traffic.requests == len(tokens)
    assert traffic.prompts.mean == pytest.approx(mean) and traffic.answers.mean == pytest.approx(
        2 * mean
    )
    assert traffic.at_once == pytest.approx(3 * mean)
    assert (
        traffic.prompts.weight == pytest.approx(sum(weights)) and len(traffic.prompts.counts) <= 19
    )


@given(st.lists(TOKENS, min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 1.0]))
def test_a_share_of_the_lengths_is_up_to_the_next_power_of_two(
    tokens: list[int], share: float
) -> None:
    limit = lengths_of(*tokens).up_to(share)
    assert sum(count <= limit for count in tokens) >= share * len(tokens) - 1e-6
    assert (
        sum(count <= limit // 2 for count in tokens) < share * len(tokens)
        if limit > 1
        else limit == 1
    )


def test_bounds_of_the_histogram() -> None:
    assert lengths_of(1).counts == (1.0,)
    assert lengths_of(2, 3, 4, 5).counts == (0.0, 1.0, 2.0, 1.0)
    assert Lengths().up_to(0.5) == 0 and Lengths().weight == 0


def test_lengths_that_changed_are_the_typical_ones_soon() -> None:
    traffic = NO_TRAFFIC
    for _ in range(1000):
        traffic = traffic.after(64, 128)
    for _ in range(LATEST):
        traffic = traffic.after(3000, 16)
    assert traffic.prompts.mean > 0.6 * 3000 and traffic.prompts.up_to(0.5) == 4096


@given(st.lists(TOKENS, min_size=1, max_size=20), st.lists(TOKENS, max_size=20))
def test_deployments_together_are_all_their_lengths(first: list[int], second: list[int]) -> None:
    both = Lengths.of_all([lengths_of(*first), lengths_of(*second)])
    together = lengths_of(*first, *second)
    assert both.mean == pytest.approx(together.mean) and both.counts == pytest.approx(
        together.counts
    )
    assert Traffic.of_all([]) == Traffic.of_all([NO_TRAFFIC]) == NO_TRAFFIC
    one, two = NO_TRAFFIC.after(1, 1, 4), NO_TRAFFIC.after(1, 1, 2)
    assert Traffic.of_all([one, two]).at_once == 3
