"""The numbers of draft tokens in a step, and of accepted ones, without the tokens themselves.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

from edgeshard.domain.checks import at_most
from edgeshard.domain.errors import InvalidArgumentError

MOST_GUESSES = 7
"""Most draft tokens of one request in a step: with the newest token it has eight rows then."""
_PLACES = tuple(
    (guessed, right) for guessed in range(MOST_GUESSES + 1) for right in range(guessed + 1)
)
_MOST_STEPS = float(1 << 32)
"""Most steps of one kind in a report."""


@dataclass(frozen=True, slots=True)
class GuessCounts:
    """A histogram of the steps of requests that decoded with no other, including steps without
    draft tokens.

    `steps[n (n + 1) / 2 + r]` weighs the steps with n draft tokens, r of which were accepted, for n
    from 0 to 7; zeros at its end are left out.
    """

    steps: Annotated[tuple[float, ...], at_most(len(_PLACES))] = ()

    def check(self) -> None:
        if not all(0.0 <= count <= _MOST_STEPS for count in self.steps):  # nan neither
            raise InvalidArgumentError("steps: they are counts from 0 to 2^32", field="steps")

    @classmethod
    def of(cls, counted: Mapping[tuple[int, int], float]) -> GuessCounts:
        """The counts from steps by their numbers of draft tokens and accepted ones."""
        steps = [float(counted.get(place, 0)) for place in _PLACES]
        while steps and not steps[-1]:
            steps.pop()
        return cls(tuple(steps))

    @classmethod
    def of_all(cls, items: Iterable[GuessCounts]) -> GuessCounts:
        """The counts of several together."""
        places = zip_longest(*(item.steps for item in items), fillvalue=0.0)
        return cls(tuple(min(_MOST_STEPS, math.fsum(place)) for place in places))

    def after(self, later: GuessCounts, decay: float) -> GuessCounts:
        """The counts with later steps added; earlier ones weigh `decay` of their former weight.
        Unchanged if there are no later steps."""
        if not later.steps:
            return self
        return GuessCounts.of_all(
            (GuessCounts(tuple(decay * count for count in self.steps)), later)
        )

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """(guessed, right, steps) of each kind of step that occurred."""
        return ((*place, count) for place, count in zip(_PLACES, self.steps, strict=False) if count)

    @property
    def tokens(self) -> float:
        """The tokens that the steps brought."""
        return sum((1 + right) * count for _, right, count in self)

    @property
    def guessed(self) -> float:
        return sum(guessed * count for guessed, _, count in self)

    @property
    def right(self) -> float:
        return sum(right * count for _, right, count in self)


NO_GUESSES = GuessCounts()


@dataclass(frozen=True, slots=True)
class ExpectedGuesses:
    """The worth of draft tokens to a request that decodes with no other, judged by the model's
    recent requests.

    `right` is the share of accepted draft tokens, and `most` how many a step may have here. It gets
    `times` as many tokens a second as without draft tokens; None if the nodes' rows were not
    measured.
    """

    most: int
    right: float
    times: float | None = None
