"""The number of micro-batches follows the load: against pipelines whose times are only computed."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.micro_batch_tuner import BETTER, MEASURED_FOR_S, MicroBatchTuner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.deployments.step_cost import Piece, StageCost, inter_token_s
from edgeshard.domain.requests.generation import StageTiming

OPEN = Batching(Mode.NO_BUBBLES, 3, 16, 2, open=True)
Disturbed = Callable[[int], float]
"""Steps in flight -> how many times slower a stage is than with one step."""


@dataclass
class Site:
    """Stages that take `weights_s` to read their weights and `row_s` for each request, and the
    head's choices."""

    stages: Sequence[tuple[float, float]]
    hop_s: float = 0.001
    disturbed: Disturbed = lambda parts: 1.0
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def stage_s(self, decodes: int, parts: int) -> list[float]:
        return [self.disturbed(parts) * (weights + row * decodes) for weights, row in self.stages]

    def token_s(self, parts: int, count: int) -> float:
        """max(R, m B), as long as the largest micro-batch takes."""
        stages = self.stage_s(-(-count // parts), parts)
        return max(sum(stages) + len(stages) * self.hop_s, parts * max(stages))

    def profile(self) -> list[StageCost]:
        """The nodes' times if only one of them works."""
        rows = (1, 64)
        return [
            StageCost(
                rows, tuple(w + r * n for n in rows), (1.0, 1.0), 0.0, 0.0, self.hop_s, 0.0, 0.0
            )
            for w, r in self.stages
        ]

    def best(self, count: int, most: int = 3) -> float:
        return min(self.token_s(parts, count) for parts in range(1, min(most, count) + 1))


class Run:
    """A head that forms steps as its spread decides, and takes the site's times."""

    def __init__(self, site: Site, spread: MicroBatchTuner) -> None:
        self.site, self.spread = site, spread
        self.now_s = 0.0
        self.seconds: Counter[int] = Counter()
        self.changes = 0
        self._pipe: deque[tuple[int, int, int]] = deque()

    def decode(self, count: int, rounds: int) -> float:
        """`rounds` rounds of `count` requests; returns seconds of a round."""
        began = self.now_s
        done = 0
        last = self.spread.parts
        while done < rounds * count:
            pieces: list[Piece] = [(100, 1)] * count
            parts = self.spread.micro_batches(pieces)
            self.changes += parts != last
            last = parts
            while len(self._pipe) < parts:
                size = -(-count // parts)
                self._pipe.append((parts, count, size))
                self.spread.formed(size, 0)
            parts, of, size = self._pipe.popleft()
            noise = 1 + self.site.noise * self.site.dice.uniform(-1, 1)
            seconds = noise * self.site.token_s(parts, of) / parts
            self.now_s += seconds
            self.seconds[parts] += 1
            stages = self.site.stage_s(size, parts)
            waited_s = self.site.token_s(parts, of) - sum(stages) - len(stages) * self.site.hop_s
            timings = [
                StageTiming(i, max(0.0, waited_s) / len(stages), s) for i, s in enumerate(stages)
            ]
            self.spread.returned(timings, self.now_s)
            done += size
        return (self.now_s - began) / rounds


def spread_of(site: Site, profiled: bool, batching: Batching = OPEN) -> MicroBatchTuner:
    return MicroBatchTuner(batching, partial(inter_token_s, site.profile()) if profiled else None)


TWO = Site([(0.012, 0.0008), (0.011, 0.0008)])
DISTURBED = Site(TWO.stages, disturbed=lambda parts: 1.0 if parts == 1 else 1.5)
"""Two nodes that share their memory, as on one machine: at the same time they are slower than one
after the other."""
UNEVEN = Site([(0.02, 0.002), (0.002, 0.0002)])


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "not profiled"])
@pytest.mark.parametrize("site", [TWO, DISTURBED, UNEVEN], ids=["two", "disturbed", "uneven"])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 12, 16])
def test_it_comes_to_the_best_number_and_stays(site: Site, profiled: bool, count: int) -> None:
    run = Run(site, spread_of(site, profiled))
    run.decode(count, 60)
    assert run.decode(count, 100) <= 1.05 * site.best(count)


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "not profiled"])
def test_trying_costs_little_of_a_first_answer(profiled: bool) -> None:
    """The rounds that find out are part of what clients wait for."""
    for count in (4, 8, 16):
        run = Run(DISTURBED, spread_of(DISTURBED, profiled))
        assert run.decode(count, 128) <= 1.08 * DISTURBED.best(count)


def test_it_changes_when_requests_come_and_go() -> None:
    """Few requests wait for weights, which one micro-batch reads once; of many the sum of rows
    counts."""
    site = Site(TWO.stages, disturbed=lambda parts: 1.0 if parts == 1 else 1.2)
    run = Run(site, spread_of(site, profiled=True))
    chosen = []
    for count in (1, 4, 32, 4, 32, 1):
        run.decode(count, 60)
        chosen.append(run.spread.parts)
    assert chosen == [1, 1, 2, 1, 2, 1]


@settings(deadline=None, max_examples=60)
# Stayed at two: 1.5 times the best.
@example([(0.0078125, 0.0), (0.00390625, 0.001953125)], 2.0, [1, 6, 4], False)
@given(
    stages=st.lists(
        st.tuples(st.floats(0.001, 0.03), st.floats(0.0, 0.003)), min_size=1, max_size=4
    ),
    slower=st.floats(1.0, 2.0),
    counts=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    profiled=st.booleans(),
)
def test_after_any_loads_it_is_near_the_best(
    stages: list[tuple[float, float]], slower: float, counts: list[int], profiled: bool
) -> None:
    site = Site(stages, disturbed=lambda parts: 1.0 if parts == 1 else slower)
    run = Run(site, spread_of(site, profiled))
    for count in counts:
        run.decode(count, 12)
        assert 1 <= run.spread.parts <= min(3, count)
    run.decode(counts[-1], 80)
    worst = 1.05 if profiled else 1.15  # without a profile the gain of fewer rows is unknown
    assert run.decode(counts[-1], 40) <= worst * site.best(counts[-1]) / (1 - BETTER)


@settings(deadline=None, max_examples=30)
@given(
    slower=st.floats(1.0, 1.6),
    count=st.integers(2, 16),
    seed=st.integers(0, 1000),
    profiled=st.booleans(),
)
def test_noise_does_not_make_it_flap(slower: float, count: int, seed: int, profiled: bool) -> None:
    site = Site(
        TWO.stages,
        disturbed=lambda parts: 1.0 if parts == 1 else slower,
        noise=0.15,
        dice=random.Random(seed),
    )
    run = Run(site, spread_of(site, profiled))
    run.decode(count, 2000)
    tries = 1 + run.now_s / MEASURED_FOR_S
    assert run.changes <= 6 * tries, (
        "there and back for each of the others, each time it may be tried"
    )


def test_what_it_measured_is_tried_again_after_a_while() -> None:
    """A neighbour on the machine makes two at once slow, and leaves."""
    slow = [1.6]
    site = Site(TWO.stages, disturbed=lambda parts: 1.0 if parts == 1 else slow[0])
    run = Run(site, spread_of(site, profiled=True))
    run.decode(8, 100)
    assert run.spread.parts == 1
    slow[0] = 1.0
    run.decode(8, int(1.5 * MEASURED_FOR_S / site.token_s(1, 8)))
    assert run.spread.parts == 2


def test_a_number_that_was_asked_for_stays() -> None:
    fixed = Batching(Mode.NO_BUBBLES, 3, 8, 2, fixed=True)
    run = Run(DISTURBED, spread_of(DISTURBED, True, fixed))
    run.decode(8, 50)
    assert set(run.seconds) == {2}


def test_a_step_never_has_more_decodes_than_were_promised() -> None:
    """If a time per token was promised, the placement's b and m hold."""
    promised = Batching(Mode.NO_BUBBLES, 3, 4, 2)
    run = Run(DISTURBED, spread_of(DISTURBED, True, promised))
    run.decode(8, 50)
    assert set(run.seconds) == {2}, "8 requests in steps of at most 4"


def test_rounds_with_prompts_in_them_are_not_measured() -> None:
    spread = spread_of(TWO, profiled=True)
    for _ in range(100):
        spread.micro_batches([(5, 1), (5, 1)])
        spread.formed(2, 64)
        spread.returned([], 1.0)
    assert not spread._measured
