"""The worth of draft tokens: how many pay in a step, and how much faster a single request becomes.
Pure.

A step with draft tokens computes a row more for each, and brings a token more for each accepted
one. (docs/speculation.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from edgeshard.domain.deployments.guesses import MOST_GUESSES, ExpectedGuesses, GuessCounts
from edgeshard.domain.deployments.step_cost import InterTokenSeconds, StageCost, inter_token_s


def rows_s(cost: InterTokenSeconds, position: int, guesses: int) -> float:
    """Seconds of a step of one request at `position` with `guesses` draft tokens, each a row like a
    decode's."""
    return cost(((position, 1),) * (1 + guesses), 1)


def that_pay(cost: InterTokenSeconds, position: int, guesses: int) -> int:
    """The most of the draft tokens that pay, by halving: a step with them takes less time than the
    steps that it saves if half of them are accepted."""
    alone_s = rows_s(cost, position, 0)
    while guesses and rows_s(cost, position, guesses) > alone_s * (1 + guesses / 2):
        guesses //= 2
    return guesses


def expected_guesses(
    counts: GuessCounts, costs: Sequence[StageCost], position: int
) -> ExpectedGuesses | None:
    """The expected worth of draft tokens for a single request whose context is `position` tokens.

    Computed from the counted steps and the nodes' `costs`; None if no step had draft tokens.
    Without `costs` it has only the counts."""
    if not counts.guessed:
        return None
    right = counts.right / counts.guessed
    if not costs:
        return ExpectedGuesses(MOST_GUESSES, right)
    cost: InterTokenSeconds = partial(inter_token_s, costs)
    most = max(that_pay(cost, position, guesses) for guesses in range(MOST_GUESSES + 1))
    return ExpectedGuesses(most, right, expected_times(counts, cost, position))


def expected_times(counts: GuessCounts, cost: InterTokenSeconds, position: int) -> float:
    """Tokens a second with draft tokens, over those without: (tokens of the steps) / (their seconds
    / a single row's).

    If fewer draft tokens pay on a node than were counted, it takes a drafted text in parts. A step
    that brought t tokens is ceil(t / w) steps of w rows there: each part except the last is
    accepted as a whole, or it is the last.
    """
    row_s = rows_s(cost, position, 0)
    if row_s <= 0.0:
        return 1.0
    pays, seconds = cache(partial(that_pay, cost, position)), cache(partial(rows_s, cost, position))
    spent_s = 0.0
    for guessed, right, steps in counts:
        draft_tokens = pays(guessed)
        parts = -(-(1 + right) // (1 + draft_tokens))
        spent_s += steps * parts * seconds(draft_tokens)
    return counts.tokens * row_s / spent_s if spent_s else 1.0
