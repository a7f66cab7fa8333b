"""The guesses that a step requests from a smaller model, the draft, and how many of them pay. Pure.

A guess of the draft costs a step of the draft and a row of the pipeline's step. If it is right, it
saves a round through the pipeline. All three are measured while requests run.
(docs/speculation.md#a-draft)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeshard.domain.requests.generation import Sampling
from edgeshard_agent.scheduler.guessing import MOST_REST

FIRST_GUESSES = 2
"""For a request while the time of a round is unknown."""
_KEPT = 0.9
"""Weight of a measurement when the next one arrives."""
_OUTLIER = 4.0
"""A round that takes this many times the usual time waited for something else; it is counted with
this limit."""
_ROW_SHARE = 0.1
"""Assumed cost of one more row, as a fraction of a round, until steps with other numbers of rows
were seen."""
_LEAST_SPREAD = 0.1
"""Least variance of the numbers of guesses in those rounds."""
_BANDS = 5
"""Bands of probabilities, each with its own trust in the draft."""
_BELIEF = 2.0
"""Weight of the initial estimate, in tested guesses."""


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """At most `most` guesses, at least 1, of the continuation of a request's `tokens`, none of
    which is among `ends`.

    The first `prompt_count` tokens are its prompt; `sampling` is how its tokens are drawn.
    `request` is the number that the stages know it by.
    """

    request: int
    tokens: tuple[int, ...]
    prompt_count: int
    sampling: Sampling
    most: int
    ends: frozenset[int] = frozenset()


class Prices:
    """Seconds that a guess costs and a token takes, as measured; newer values count more."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0
        self._tokens = self._spent_s = 0.0
        self.guess_s = 0.0
        """Seconds of one step of the draft."""
        self.row_s = 0.0
        """Seconds that a row more adds to a round: the slope of the line through the rounds
        seen."""
        self.token_s = 0.0
        """Seconds that a right guess saves: the present time of a token, and no more than a round
        without guesses."""

    def drew(self, seconds: float) -> None:
        """A step of the draft took `seconds`."""
        usual = self.guess_s
        seconds = min(seconds, _OUTLIER * usual) if usual else seconds
        self.guess_s = seconds if not usual else _KEPT * usual + (1 - _KEPT) * seconds

    def passed(self, guesses: int, tokens: int, seconds: float, drafting_s: float) -> None:
        """A round whose step had `guesses` guesses brought `tokens` tokens, in `seconds` without
        the draft's time."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self._seconds / self._weight)
        parts = (1.0, guesses, seconds, guesses * guesses, guesses * seconds)
        sums = (self._weight, self._rows, self._seconds, self._rows_squared, self._product)
        self._weight, self._rows, self._seconds, self._rows_squared, self._product = (
            _KEPT * total + part for total, part in zip(sums, parts, strict=True)
        )
        self._tokens = _KEPT * self._tokens + tokens
        self._spent_s = _KEPT * self._spent_s + seconds + drafting_s
        self._measure()

    @property
    def are_known(self) -> bool:
        return self.token_s > 0 and self.guess_s > 0

    def _measure(self) -> None:
        """The line through the rounds seen: seconds of one without guesses, and of each row
        more."""
        mean_s, rows = self._seconds / self._weight, self._rows / self._weight
        spread = self._rows_squared / self._weight - rows * rows
        slope = _ROW_SHARE * mean_s / (1 + _ROW_SHARE * rows)
        if spread > _LEAST_SPREAD:
            slope = min(
                max(self._product / self._weight - rows * mean_s, 0.0) / spread, mean_s / (1 + rows)
            )
        self.row_s = slope
        self.token_s = min(self._spent_s / self._tokens, mean_s - rows * slope)


@dataclass(slots=True)
class Trust:
    """The accuracy of the draft for one request: the fraction of its guesses that were right, by
    the probability that it gave them. A token that the draft was sure of is drawn more often.

    If no guess pays, it rests for 1, 2, 4 and up to `MOST_REST` steps, and then tries one.
    """

    expected: float = 0.6
    """How likely the next guess is right, before it is drawn."""
    right: list[float] = field(
        default_factory=lambda: [_BELIEF * (0.3 + 0.13 * band) for band in range(_BANDS)]
    )
    tested: list[float] = field(default_factory=lambda: [_BELIEF] * _BANDS)
    rest: int = 0
    misses: int = 0
    is_trial: bool = False
    """Whether the guess that comes is one to learn by, whatever it costs."""

    def chance(self, probability: float) -> float:
        """How likely a guess of this probability is right."""
        band = _band(probability)
        return self.right[band] / self.tested[band]

    def drawn(self, probability: float) -> None:
        """The draft gave its guess this probability."""
        self.expected += (self.chance(probability) - self.expected) / 8

    def noted(self, probabilities: Sequence[float], right: int) -> None:
        """Record that the first `right` guesses with these probabilities were right and the next
        was wrong; later ones were not tested."""
        for index, probability in enumerate(probabilities[: right + 1]):
            band = _band(probability)
            self.tested[band] += 1
            self.right[band] += index < right
            if self.tested[band] > 32:  # recent guesses count more
                self.tested[band] /= 2
                self.right[band] /= 2

    def begins(self, prices: Prices) -> bool:
        """Whether to guess at all in the next step; call it once for each step."""
        self.is_trial = False
        if self.rest:
            self.rest -= 1
            self.is_trial = self.rest == 0
            return self.is_trial
        if not prices.are_known or goes_on(1.0, self.expected, prices):
            self.misses = 0
            return True
        self.rest = min(MOST_REST, 2**self.misses)
        self.misses += 1
        return False


def goes_on(chance_of_all: float, expected: float, prices: Prices) -> bool:
    """Whether another guess pays. `expected` is its chance to be right, and `chance_of_all` the
    chance that all guesses before it are.
    """
    return chance_of_all * expected * prices.token_s > prices.guess_s + prices.row_s


def is_kept(chance_of_all: float, prices: Prices) -> bool:
    """Whether a row pays for a drawn guess. `chance_of_all` is the chance that it and all guesses
    before it are right.
    """
    return chance_of_all * prices.token_s > prices.row_s


def _band(probability: float) -> int:
    return min(_BANDS - 1, int(probability * _BANDS))
