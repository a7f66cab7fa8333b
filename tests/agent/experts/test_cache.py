"""The experts of a mixture that stay in memory: never more than fit, and each read once in a
prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from edgeshard_agent.experts import (
    CacheCounts,
    Choices,
    Expert,
    ExpertCache,
    ExpertTable,
    ForecastCache,
    LeastRecentlyUsed,
    Sizes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.training.expert_learning import learn
from edgeshard.domain.errors import InvalidArgumentError

LAYERS = 4
EXPERTS = 8
CHOSEN = 2


def replay(choices: Choices, cache: ExpertCache) -> CacheCounts:
    """The counts of a cache on recorded routing, token by token, if every read ahead finishes in
    time."""
    for token in choices:
        for layer, chosen in enumerate(token):
            for expert in cache.likely(layer):
                cache.bring(layer, expert)
            cache.choose(layer, chosen[None])
    return cache.counts


def routing(tokens: int, seed: int = 0) -> Choices:
    """Skewed routing that follows from the previous layer, except for every fifth choice."""
    random = np.random.default_rng(seed)
    skew = np.arange(EXPERTS, 0, -1.0) ** 2
    follows = np.random.default_rng(7).permuted(np.tile(np.arange(EXPERTS), (LAYERS, 1)), axis=1)
    result = np.zeros((tokens, LAYERS, CHOSEN), np.int16)
    for token in range(tokens):
        chosen = random.choice(EXPERTS, CHOSEN, replace=False, p=skew / skew.sum())
        for layer in range(LAYERS):
            if layer:
                chosen = follows[layer, chosen]
            if random.random() < 0.2:
                chosen = random.choice(EXPERTS, CHOSEN, replace=False)
            result[token, layer] = np.sort(chosen)
    return result


TABLE = learn(routing(2000), EXPERTS)


EVEN = np.full((LAYERS, EXPERTS), 10, np.int64)
UNEVEN = np.where(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) % 3, 5, 10)


def caches(slots: int, sizes: Sizes = EVEN) -> list[ExpertCache]:
    return [LeastRecentlyUsed(10 * slots, sizes), ForecastCache(10 * slots, sizes, TABLE)]


class Memory:
    """Executes the cache's decisions, and records invalid ones."""

    def __init__(self, cache: ExpertCache, slots: int, sizes: Sizes) -> None:
        self.cache = cache
        self.room = 10 * slots
        self.sizes = sizes
        self.held: set[Expert] = set()

    def step(self, layer: int, chosen: np.ndarray) -> int:
        """Returns the experts read once the routers had spoken."""
        for expert in self.cache.likely(layer, len(chosen)):
            self._read((layer, expert), self.cache.bring(layer, expert))
        used, loads = [], 0
        for use in self.cache.choose(layer, chosen):
            if use.load:
                self._read(use.expert, use.victims)
                loads += 1
            assert use.expert in self.held, "computed without weights"
            used.append(use.expert)
        assert sorted(used) == [(layer, expert) for expert in np.unique(chosen).tolist()]
        return loads

    def _read(self, expert: Expert, gone: Sequence[Expert]) -> None:
        self.held -= set(gone)
        assert expert not in self.held, "read again"
        self.held.add(expert)
        assert sum(int(self.sizes[some]) for some in self.held) <= self.room


@given(
    st.integers(1, LAYERS * EXPERTS),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_more_than_the_slots_and_one_read_for_an_expert_and_layer(
    slots: int, steps: list[int], seed: int
) -> None:
    for cache, sizes in [(some, of) for of in (EVEN, UNEVEN) for some in caches(slots, of)]:
        memory, choices = Memory(cache, slots, sizes), routing(sum(steps), seed)
        for first, tokens in zip(np.cumsum([0, *steps[:-1]]), steps, strict=True):
            for layer in range(LAYERS):
                chosen = choices[first : first + tokens, layer]
                assert memory.step(layer, chosen) <= len(np.unique(chosen))


@pytest.mark.parametrize("slots", [8, 16, 24])
def test_forecasts_hit_more_often_and_read_no_more(slots: int) -> None:
    plain, ours = (replay(routing(600, seed=1), cache) for cache in caches(slots))
    assert ours.hit_rate >= plain.hit_rate + 0.05
    assert ours.bytes_read <= plain.bytes_read
    assert ours.needed == plain.needed == 600 * LAYERS * CHOSEN


def test_with_room_for_all_each_is_read_once() -> None:
    choices = routing(600, seed=1)
    used = {
        (layer, expert)
        for token in choices.tolist()
        for layer, some in enumerate(token)
        for expert in some
    }
    for cache in caches(LAYERS * EXPERTS):
        assert replay(choices, cache).bytes_read == 10 * len(used)


def test_a_forecast_is_what_was_seen() -> None:
    """If one expert always follows another, it is nearly certain; for unknown choices the expert's
    share is returned.
    """
    choices = np.zeros((400, 3, 1), np.int16)
    choices[::2] = 1  # token after token: all zeros, all ones
    table = learn(choices, 2)
    one = np.array([[1]], np.int16)
    assert table.forecast(2, one, one)[1] > 0.95
    assert table.forecast(2, one, one)[0] < 0.05
    assert table.forecast(0, one, one)[0] > 0.95, (
        "the next token's first layer follows from this one's last"
    )
    assert table.forecast(2, None, None)[1] == pytest.approx(0.5, abs=0.1)
    both = np.array([[0], [1]], np.int16)
    assert (table.forecast(2, both, both) > 0.9).all(), "one of two tokens each"


def test_a_table_is_kept_and_read_again() -> None:
    again = ExpertTable.of_values(TABLE.values(), LAYERS, EXPERTS)
    assert np.allclose(again.last, TABLE.last, atol=1e-2)
    nothing = [[float("nan")] * EXPERTS] * LAYERS
    for changed in (
        {"last": TABLE.values()["base"]},
        {"base": nothing},
        {"base": ["x"]},
        {"base": [[1], 2]},
    ):
        with pytest.raises(InvalidArgumentError):
            ExpertTable.of_values(TABLE.values() | changed, LAYERS, EXPERTS)
    with pytest.raises(InvalidArgumentError):
        ExpertTable.of_values({}, LAYERS, EXPERTS)
