"""The slicer against brute force and against the simulator, and the balanced partition against
brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from bench.hpipe_paper.partition import balanced_partition
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.costs.slicing import best_slices
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import HopTimes, Pipeline, SimulatedTraffic, StageTimes
from tests.planning.oracles.slicings import slice_times, slicing_seconds


def growing(fixed: float, each: float, attention: float) -> Callable[[int, int], float]:
    """A step's overhead, the work per token, and attention over all that came before and half of
    the slice."""
    return lambda start, length: fixed + each * length + attention * length * (start + length / 2)


def slicings(units: int) -> Iterator[tuple[int, ...]]:
    for count in range(units):
        for cuts in combinations(range(1, units), count):
            yield tuple(b - a for a, b in pairwise((0, *cuts, units)))


@pytest.mark.parametrize("seed", range(40))
def test_no_slicing_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units, count = int(rng.integers(1, 13)), int(rng.integers(1, 5))
    if seed % 2:  # any times at all: nothing about their growth is assumed
        table = rng.uniform(0.1, 3, (count, units + 1, units + 1))
        devices: list[Callable[[int, int], float]] = [
            partial(lambda j, start, length: float(table[j, start, length]), j)
            for j in range(count)
        ]
    else:
        devices = [
            growing(*(float(x) for x in rng.uniform((0, 0.1, 0), (1, 2, 0.3))))
            for _ in range(count)
        ]
    hops = [
        partial(lambda rate, length: rate * length, float(rng.uniform(0, 0.5)))
        for _ in range(count - 1)
    ]
    found = best_slices(slice_times(devices, units, hops))
    assert found.exact
    assert sum(found.lengths) == units
    assert found.ttft_s == pytest.approx(slicing_seconds(devices, found.lengths, hops))
    least = min(slicing_seconds(devices, lengths, hops) for lengths in slicings(units))
    assert found.ttft_s == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_slices_never_grow_where_later_ones_cost_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device = growing(
        float(rng.uniform(0.1, 2)), float(rng.uniform(0.5, 2)), float(rng.uniform(0.02, 0.4))
    )
    lengths = best_slices(slice_times([device] * int(rng.integers(2, 7)), 24)).lengths
    assert len(lengths) > 1
    assert list(lengths) == sorted(lengths, reverse=True)


def test_strong_growth_makes_the_first_slice_longer_than_the_last() -> None:
    lengths = best_slices(slice_times([growing(0.5, 0.2, 0.2)] * 3, 32)).lengths
    assert lengths[0] > lengths[-1]


def test_equal_devices_and_eight_slices_take_ten_twenty_fourths() -> None:
    device = growing(0.0, 1.0, 0.0)
    assert slicing_seconds([device] * 3, (8,) * 8) == pytest.approx(
        10 / 24 * slicing_seconds([device] * 3, (64,))
    )


def test_an_overhead_as_large_as_the_work_leaves_the_prompt_whole() -> None:
    assert best_slices(slice_times([growing(100.0, 0.1, 0.0)] * 3, 16)).lengths == (16,)


@pytest.mark.parametrize("seed", range(10))
def test_the_simulator_gives_the_recurrence(seed: int) -> None:
    """The recurrence has hops as pure delays; so has the ring here, and the way back is free."""
    rng = np.random.default_rng(seed)
    devices = [
        growing(*(float(x) for x in rng.uniform((0, 0.1, 0), (1, 2, 0.3)))) for _ in range(4)
    ]
    lengths = tuple(int(x) for x in rng.integers(1, 6, 5))
    delay = float(rng.uniform(0, 2))
    stages = tuple(
        StageTimes(
            partial(lambda device, tokens, context: device(context, tokens), device),
            lambda b, c: 0.0,
        )
        for device in devices
    )
    hops = (*(HopTimes(lambda tokens: 0.0, delay) for _ in range(3)), HopTimes(lambda tokens: 0.0))
    simulated = simulate(
        Pipeline(stages, hops),
        SimulatedTraffic(prompt_tokens=sum(lengths), new_tokens=1, slices=lengths),
    )
    assert simulated.ttft_s == pytest.approx(
        slicing_seconds(devices, lengths, lambda length: delay)
    )


def test_too_many_labels_leave_a_good_slicing_that_claims_nothing() -> None:
    devices = [
        growing(0.3, each, attention)
        for each, attention in ((1, 0.02), (1.1, 0.05), (0.9, 0.1), (1.1, 0.01))
    ]
    found = best_slices(slice_times(devices, 24, lambda length: 0.1 * length), label_limit=3)
    assert not found.exact
    best = best_slices(slice_times(devices, 24, lambda length: 0.1 * length))
    assert best.exact
    assert (
        best.ttft_s <= found.ttft_s < slicing_seconds(devices, (24,), lambda length: 0.1 * length)
    )


@pytest.mark.parametrize("device", [growing(-1.0, 0.1, 0.0), growing(float("nan"), 1.0, 0.0)])
def test_a_time_that_cannot_be_is_refused(device: Callable[[int, int], float]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        best_slices(slice_times([device], 4))
    assert caught.value.field == "devices"


def test_as_many_hops_as_gaps_are_asked_for() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        best_slices(slice_times([growing(0, 1, 0)] * 3, 4, [lambda length: 0.0]))
    assert caught.value.field == "comm"


@pytest.mark.parametrize("seed", range(30))
def test_no_partition_has_a_faster_slowest_device(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices, units = int(rng.integers(1, 5)), int(rng.integers(4, 10))
    seconds, sizes = rng.uniform(0.1, 1, (devices, units)), rng.uniform(1, 2, units)
    room = rng.uniform(1.0, 2.0, devices) * sizes.sum() / devices

    def slowest(ends: tuple[int, ...]) -> float:
        ranges = list(pairwise((0, *ends)))
        if any(sizes[a:b].sum() > room[m] for m, (a, b) in enumerate(ranges)):
            return np.inf
        return max(float(seconds[m, a:b].sum()) for m, (a, b) in enumerate(ranges))

    every = [(*cuts, units) for cuts in combinations(range(1, units), devices - 1)]
    least = min(slowest(ends) for ends in every)
    found = balanced_partition(seconds.tolist(), sizes.tolist(), room.tolist())
    if np.isinf(least):
        assert found is None
    else:
        assert found is not None
        assert slowest(found) == pytest.approx(least)


def test_half_layers_balance_better_than_layers() -> None:
    """Three layers on two equal devices: 2 + 1 layers, or one and a half each."""
    assert balanced_partition([[2.0] * 3] * 2) in ((1, 3), (2, 3))
    assert balanced_partition([[1.0] * 6] * 2) == (3, 6)


def test_fewer_units_than_devices_is_no_partition() -> None:
    assert balanced_partition([[1.0]] * 2) is None
