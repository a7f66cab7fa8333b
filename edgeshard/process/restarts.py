"""Restarts of a process that has ended. Pure: times are seconds of one monotonic clock."""

from __future__ import annotations

from collections import deque

from edgeshard.domain.errors import DeniedError

WINDOW_S = 60.0
MOST_STARTS = 5
"""Most starts within any `WINDOW_S`; after as many failed starts in a row there is no other."""
FIRST_PAUSE_S = 0.25


class Restarts:
    """Decides when one process starts again after it ended, and when it cannot start."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._in_vain = 0

    def started(self, now_s: float) -> None:
        """Note a start."""
        self._starts.append(now_s)

    def pause_s(self, now_s: float, exit_code: int, in_vain: bool) -> float | None:
        """Seconds from an end to the next start; None if the process cannot start.

        The pause doubles with each start of the last minute. `in_vain` means that the ended start had failed.
        """
        self._in_vain = self._in_vain + 1 if in_vain else 0
        # Denied, as after edgectl delete node: another try would get the same answer.
        if exit_code == DeniedError.exit_code or self._in_vain == MOST_STARTS:
            return None
        recent = [start for start in self._starts if now_s - start < WINDOW_S]
        if len(recent) == MOST_STARTS:
            return recent[0] + WINDOW_S - now_s
        return float(FIRST_PAUSE_S * 2 ** len(recent))
