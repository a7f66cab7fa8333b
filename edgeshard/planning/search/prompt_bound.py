"""Lower bounds of the first token and the answer of any cut, by solvers of sums. Pure.

The floor of a prompt in slices (`prompt_floor`) is, for the station j that it waits for longest,

    sum over stages of the lesser of first and last slice  +  [all slices on j, less that],

a round R and a busiest station B of their own. The least R of the cuts whose B keeps a threshold
falls as the threshold rises. So cuts are divided by ranges of B: one whose B is in (low, high]
takes at least low and the least R under high. The search queries or halves the range with the
lowest bound, until no cut can be better or the queries are spent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgeshard.planning.costs.prompt_floor import PromptFloor
from edgeshard.planning.solvers import classes, general
from edgeshard.planning.solvers.bounded_search import Oracle
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, with_tokens
from edgeshard.planning.solvers.scoring import SLACK
from edgeshard.planning.solvers.walks import INFINITY, Kinds, Problem

QUESTIONS = (2, 24)
"""The fewest and the most; in between as many as make WORK."""
WORK = 300_000
"""Questions times kinds ** 2.5 times layers."""
_NEAR = 1e-3
"""A range is halved if another query raised its R by less than this part."""

_BY_SLICE = ("compute_s", "embed_s", "overhead_s", "hop_s")
"""Seconds that each slice takes again."""


@dataclass(slots=True)
class _Range:
    """Cuts with B in (low, high], and a lower bound of their R; `is_solved` if it was queried under
    `high`."""

    low: float
    high: float
    round_s: float
    is_solved: bool = False

    @property
    def bound_s(self) -> float:
        return self.low + self.round_s


class PromptBound:
    """One search below a value that is known; `cuts` were found on the way, `bound_s` is a lower
    bound of all.

    No cut takes less than its R of `rounds` and its B of `stations` together.
    """

    def __init__(self, floor: PromptFloor, decode: Instance, tokens: float, kinds: Kinds) -> None:
        least = _lesser(floor.first, floor.last)
        self.rounds = with_tokens(least, decode, tokens)
        self.stations = _beyond(floor.whole, least, decode)
        self._kinds = kinds
        few = len(kinds.members) <= classes.MOST_KINDS + 1
        self._oracle = Oracle(
            self.rounds, kinds, classes.EFFORT if few else general.EFFORT_PER_THRESHOLD
        )
        one = len(kinds.members) ** 2.5 * decode.layers
        self._left = min(QUESTIONS[1], max(QUESTIONS[0], int(WORK / one)))
        self.cuts: list[Cut] = []
        self.bound_s = 0.0

    def run(self, value_s: float) -> None:
        ranges = [_Range(0.0, INFINITY, 0.0)]
        while True:
            lowest = min(ranges, key=lambda one: one.bound_s)
            self.bound_s = min(value_s, lowest.bound_s)
            if lowest.bound_s >= value_s * (1 - SLACK) or self._left <= 0:
                return
            # Above this B no cut is below the value.
            high = min(lowest.high, value_s - lowest.round_s)
            if not lowest.is_solved or high < lowest.high * (1 - SLACK):
                before, lowest.high = lowest.round_s, high
                self._ask(lowest, value_s)
                lowest.is_solved = lowest.round_s < before * (1 + _NEAR)
            else:
                middle = (lowest.low + lowest.high) / 2
                ranges.append(replace(lowest, low=middle))
                lowest.high, lowest.is_solved = middle, False

    def _ask(self, span: _Range, value_s: float) -> None:
        self._left -= 1
        problem = Problem(self.rounds, self._kinds, INFINITY)
        if span.high < INFINITY:
            problem.restrict(Problem(self.stations, self._kinds, span.high))
        answer = self._oracle.answer(problem, value_s - span.low)
        span.round_s = max(span.round_s, answer.bound_s)
        if answer.cut is not None:
            self.cuts.append(answer.cut)


def _lesser(one: Instance, other: Instance) -> Instance:
    return replace(
        one, **{name: np.minimum(getattr(one, name), getattr(other, name)) for name in _BY_SLICE}
    )


def _beyond(whole: Instance, least: Instance, memory: Instance) -> Instance:
    """The stations' seconds beyond their part of a round; 0 for time that a round contains once
    anyway."""

    def beyond(name: str) -> Floats:
        more, less = getattr(whole, name), getattr(least, name)
        difference = np.subtract(
            more, less, out=np.full_like(more, INFINITY), where=np.isfinite(more)
        )
        return np.asarray(np.maximum(0.0, difference))

    once = {
        name: np.zeros_like(getattr(whole, name)) for name in ("head_s", "return_s", "latency_s")
    }
    seconds: dict[str, Any] = once | {name: beyond(name) for name in _BY_SLICE}
    return replace(memory, **seconds)
