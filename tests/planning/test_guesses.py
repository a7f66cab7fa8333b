"""The value of guesses: compared with a head that guesses step by step, and pays for each row."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from edgeshard_agent.scheduler.guessing import Guessed, Guessing, NgramDrafter

from edgeshard.domain.deployments.guesses import MOST_GUESSES, NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.step_cost import (
    InterTokenSeconds,
    Piece,
    StageCost,
    inter_token_s,
)
from edgeshard.planning.costs.guesses import expected_guesses, expected_times, that_pay


def stage(row_s: float, base_s: float = 1.0, pair_s: float = 0.0) -> StageCost:
    """A step takes `base_s`, and `row_s` more for each row after the first."""
    decode_s = tuple(base_s + row_s * (rows - 1) for rows in (1, 8))
    return StageCost((1, 8), decode_s, decode_s, pair_s, 0.0, 0.01, 0.0, 0.001)


def text(seed: int, repeats: float) -> list[int]:
    """Tokens; for some stretches they repeat the tokens after an earlier occurrence."""
    dice, tokens = random.Random(seed), [0, 1, 2]
    while len(tokens) < 3000:
        if dice.random() < repeats:
            begin = dice.randrange(len(tokens))
            tokens += tokens[begin : begin + dice.randrange(2, 40)]
        else:
            tokens.append(dice.randrange(400))
    return tokens


def guessed_through(
    tokens: Sequence[int], cost: InterTokenSeconds, position: int
) -> tuple[GuessCounts, float]:
    """The steps in which a head guesses its way through a text, and their seconds. Its steps cost
    as much as at `position`, so that a plan uses the same costs."""
    guessing = Guessing(
        inter_token_s=lambda pieces, flight: cost(((position, 1),) * len(pieces), flight)
    )
    guessed = Guessed(NgramDrafter())
    counted = Counter[tuple[int, int]]()
    seconds = 0.0
    place = 3
    while place < len(tokens):
        guesses = guessing.guesses(
            guessed, tokens[:place], min(MOST_GUESSES, len(tokens) - place - 1)
        )
        right = next(
            (n for n, token in enumerate(guesses) if tokens[place + n] != token), len(guesses)
        )
        seconds += cost(((position, 1),) * (1 + len(guesses)), 1)
        guessed.noted(len(guesses), right)
        counted[len(guesses), right] += 1
        place += 1 + right
    return GuessCounts.of(counted), seconds


@pytest.mark.parametrize("repeats", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("row_s", [0.0, 0.05, 0.2, 0.45])
def test_the_times_are_those_of_a_head_that_guesses_its_way_through_a_text(
    repeats: float, row_s: float
) -> None:
    """On the nodes on which it was seen, exactly. If it was seen when all guesses paid, and is
    planned when fewer do: nearly, since the head's pace is then another."""
    tokens, position = text(1, repeats), 500
    costs = [stage(row_s), stage(row_s, 0.5, pair_s=1e-4)]
    cost = partial(inter_token_s, costs)
    counts, seconds = guessed_through(tokens, cost, position)
    alone_s = (len(tokens) - 3) * cost(((position, 1),), 1)
    assert expected_times(counts, cost, position) == pytest.approx(alone_s / seconds, rel=1e-9)
    elsewhere, _ = guessed_through(tokens, partial(inter_token_s, [stage(0.0)]), position)
    assert expected_times(elsewhere, cost, position) == pytest.approx(alone_s / seconds, rel=0.15)


@pytest.mark.parametrize("row_s", [0.0, 0.1, 0.3, 0.45, 0.6])
def test_a_guessed_text_is_taken_in_parts_where_fewer_guesses_pay(row_s: float) -> None:
    """The same guesses of a step, drawn again from the last right one, as many as pay each time."""
    dice, cost = random.Random(4), partial(inter_token_s, [stage(row_s)])
    counted = Counter[tuple[int, int]]()
    seconds = 0.0
    tokens = 0
    for _ in range(500):
        guessed = dice.randint(0, MOST_GUESSES)
        right = dice.randint(0, guessed)
        counted[guessed, right] += 1
        tokens += 1 + right
        taken, left = that_pay(cost, 90, guessed), 1 + right
        while left > 0:
            seconds += cost(((90, 1),) * (1 + taken), 1)
            left -= 1 + taken
    alone_s = tokens * cost(((90, 1),), 1)
    assert expected_times(GuessCounts.of(counted), cost, 90) == pytest.approx(
        alone_s / seconds, rel=1e-9
    )


def test_as_many_guesses_pay_as_save_more_than_they_cost_where_half_are_right() -> None:
    def cost(row_s: float, pieces: Sequence[Piece], _: int) -> float:
        return 1.0 + row_s * (len(pieces) - 1)

    found = [
        [that_pay(partial(cost, row_s), 10, guesses) for guesses in range(MOST_GUESSES + 1)]
        for row_s in (0.0, 0.49, 0.51)
    ]
    assert found == [list(range(MOST_GUESSES + 1))] * 2 + [[0] * (MOST_GUESSES + 1)]
    dear = partial(
        inter_token_s,
        [StageCost((1, 4, 5, 8), (1.0, 1.2, 9.0, 9.0), (1.0,) * 4, 0.0, 0.0, 0.0, 0.0, 0.0)],
    )
    assert [that_pay(dear, 10, guesses) for guesses in (1, 3, 4, 7)] == [1, 3, 2, 3]


def test_what_is_expected_says_what_was_seen_and_no_more() -> None:
    counts = GuessCounts.of({(0, 0): 10, (4, 3): 5, (7, 0): 1})
    assert expected_guesses(NO_GUESSES, [stage(0.1)], 10) is None
    assert expected_guesses(GuessCounts.of({(0, 0): 10}), [stage(0.1)], 10) is None
    unmeasured = expected_guesses(counts, (), 10)
    assert (
        unmeasured is not None
        and unmeasured.times is None
        and unmeasured.right == pytest.approx(15 / 27)
    )
    found = expected_guesses(counts, [stage(0.1)], 10)
    assert found is not None and (found.most, found.right) == (7, unmeasured.right)
    assert found.times is not None and 1.0 < found.times < 31 / 16
    free = expected_guesses(
        counts, [StageCost((1, 8), (1.0, 1.0), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, 0.0)], 10
    )
    assert free is not None and free.times == pytest.approx(31 / 16), "tokens over steps"
    dear = expected_guesses(counts, [stage(2.0)], 10)
    assert dear is not None and dear.most == 0 and dear.times == pytest.approx(1.0)
