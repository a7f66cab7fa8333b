"""The guesses that the sampling stage received: by step, once, and only the needed ones."""

from __future__ import annotations

from edgeshard_agent.engine.stage_runner import MOST_STEPS, ToldGuesses


def test_each_steps_guesses_are_taken_once_and_never_by_another_step() -> None:
    told = ToldGuesses()
    told.put(4, {1: (7, 8)})
    assert told.take(5) == {} and told.take(4) == {1: (7, 8)} and told.take(4) == {}


def test_guesses_that_came_too_late_do_not_pile_up() -> None:
    told = ToldGuesses()
    for step in range(MOST_STEPS + 9):
        told.put(step, {1: (step,)})
    assert [step for step in range(MOST_STEPS + 9) if told.take(step)] == list(
        range(9, MOST_STEPS + 9)
    )
