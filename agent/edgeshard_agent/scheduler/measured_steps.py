"""Times that decode steps were seen to take: seconds of each stage by the requests of a step, and of the way around.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edgeshard.domain.requests.generation import StageTiming

_NEW = 0.2
"""Weight of the newest step among those of as many requests."""


class MeasuredSteps:
    """Stage and hop times of a pipeline whose nodes nobody has profiled, from the steps that it runs."""

    def __init__(self) -> None:
        self._stages: dict[int, list[float]] = {}
        self._hops_s: float | None = None

    def saw(self, rows: int, timings: Sequence[StageTiming], round_s: float) -> None:
        """A step of so many decodes is back, `round_s` after it was formed."""
        if not timings:
            return
        computed = [timing.compute_s for timing in timings]
        hops_s = max(0.0, round_s - sum(timing.wait_s + timing.compute_s for timing in timings))
        known = self._stages.get(rows)
        if known is None or len(known) != len(computed):
            self._stages[rows] = computed
        else:
            self._stages[rows] = [old + _NEW * (new - old) for old, new in zip(known, computed, strict=True)]
        self._hops_s = hops_s if self._hops_s is None else self._hops_s + _NEW * (hops_s - self._hops_s)

    def inter_token_s(self, rows: int, in_flight: int) -> float | None:
        """max(R, m B) for `in_flight` steps of so many decodes; None before any step was seen.

        Between two numbers of decodes that were seen, times are on the line through them; beyond them they stay, since
        a small step mostly reads weights.
        """
        if not self._stages or self._hops_s is None:
            return None
        stages = self._at(rows)
        return max(sum(stages) + self._hops_s, in_flight * max(stages))

    def _at(self, rows: int) -> list[float]:
        below = max((seen for seen in self._stages if seen <= rows), default=None)
        above = min((seen for seen in self._stages if seen >= rows), default=None)
        if below is None or above is None or below == above:
            nearest = above if below is None else below
            assert nearest is not None
            return self._stages[nearest]
        share = (rows - below) / (above - below)
        pairs = zip(self._stages[below], self._stages[above], strict=True)
        return [low + share * (high - low) for low, high in pairs]
