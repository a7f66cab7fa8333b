"""The guesses of steps that the head sent to the sampling stage, each kept until that step is computed."""

from __future__ import annotations

import threading

from edgeshard.domain.requests.step import GuessedTokens

MOST_STEPS = 64
"""More than are in flight: of older ones the guesses came too late."""


class ToldGuesses:
    """Guesses by step; for several threads. No guess of a step without an entry counts, and no
    thread waits for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_step: dict[int, GuessedTokens] = {}

    def put(self, step: int, guessed: GuessedTokens) -> None:
        with self._lock:
            self._by_step[step] = guessed
            if len(self._by_step) > MOST_STEPS:
                del self._by_step[min(self._by_step)]

    def take(self, step: int) -> GuessedTokens:
        """Those of a step, as far as they have come."""
        with self._lock:
            return self._by_step.pop(step, {})
