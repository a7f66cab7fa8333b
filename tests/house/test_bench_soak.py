"""The soak's verdict on flat memory, on samples with a known answer; `test_benches.py` has a short
one on a real site.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.flatness import MIB, ProcessSample, Sample, growth, problems, slope


def samples(
    rss: Callable[[float], float],
    seconds: float = 1800,
    threads: Callable[[float], int] = lambda _: 12,
) -> list[Sample]:
    """One process, sampled each 10 s; its memory and threads as functions of the seconds."""
    times = [float(at) for at in range(0, int(seconds) + 1, 10)]
    return [
        Sample(at, {"a": ProcessSample(int(rss(at)), threads(at), 20)}, {"a": 0}, 0) for at in times
    ]


def test_a_slope_is_that_of_the_line() -> None:
    assert slope([(0, 5), (2, 9), (4, 13)]) == pytest.approx(2)
    assert slope([(0, 1), (1, 0), (2, 1)]) == pytest.approx(0)
    assert slope([]) == slope([(3, 8)]) == 0


def test_memory_that_goes_up_and_down_is_flat_and_one_that_creeps_up_is_not() -> None:
    assert not problems(samples(lambda at: 400 * MIB + (at % 70) * MIB / 70))
    (found,) = problems(samples(lambda at: 400 * MIB + 1.5 * MIB * at / 600 + (at % 70) * MIB / 70))
    assert found.startswith("a grew by 1.5")


def test_what_is_taken_while_warming_up_does_not_count() -> None:
    assert not problems(samples(lambda at: 400 * MIB + min(at, 400) * MIB))


def test_threads_that_pile_up_are_told() -> None:
    (found,) = problems(samples(lambda _: 400 * MIB, threads=lambda at: 12 + int(at / 300)))
    assert "threads" in found
    assert not problems(samples(lambda _: 400 * MIB, threads=lambda at: 12 + int(at / 10) % 2))


def test_a_short_run_says_nothing_of_memory() -> None:
    short = samples(lambda at: at * MIB, seconds=700)
    assert growth(short) == {} and not problems(short)
