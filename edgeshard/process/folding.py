"""A limit on too frequent log lines. Pure: times are seconds of one clock, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Period:
    ends: float
    lines: int = 0


class Folds:
    """Lines of one name pass `MOST_LINES` times in `PERIOD_S` from the first of them; the others are counted.

    Without the limit a caller could fill the disk, for example by connections that cannot be
    accepted. `MOST_NAMES` names are distinguished at a time; all further names count as one.
    """

    MOST_LINES = 100
    PERIOD_S = 60.0
    MOST_NAMES = 256

    def __init__(self) -> None:
        self._periods: dict[str, _Period] = {}

    def passes(self, name: str, now: float) -> bool:
        """Whether a line of that name is written. Call `over` with the same time before."""
        if name not in self._periods and len(self._periods) >= self.MOST_NAMES:
            name = "others"
        period = self._periods.setdefault(name, _Period(now + self.PERIOD_S))
        period.lines += 1
        return period.lines <= self.MOST_LINES

    def over(self, now: float) -> list[tuple[str, int]]:
        """Forget the periods that have ended; returns each name of which lines were left out, and their number."""
        left_out = []
        # All periods have the same length, so they end in the order in which they began.
        while self._periods:
            name, period = next(iter(self._periods.items()))
            if period.ends > now:
                break
            del self._periods[name]
            if period.lines > self.MOST_LINES:
                left_out.append((name, period.lines - self.MOST_LINES))
        return left_out
