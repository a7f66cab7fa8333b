"""The number of micro-batches for decoding requests, chosen while they run. Pure: times come in as
values.

Two micro-batches keep two nodes at work, but each reads the weights. The best number depends on the
number of requests and on the times of nodes and links. A profile predicts it, but is wrong if nodes
disturb each other. So the choice begins with the profile (or with the observed steps) and measures
the time between two tokens under the current number. It tries another number for a few rounds if
that could be better. (docs/papers/agent.md#batching-step-by-step)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from edgeshard.domain.deployments.step_cost import InterTokenSeconds, Piece
from edgeshard.domain.requests.generation import StageTiming
from edgeshard_agent.scheduler.batching import Batching

ROUNDS = 5
"""Rounds (a token for every request) whose median counts as measured; one before them is left
out."""
MEANS_OVER = 8
"""Measurements of a setting that count, about: one that was lucky does not win for long."""
BETTER = 0.03
"""A number of micro-batches replaces another if it saves this fraction of the time between
tokens."""
HOPE = 0.15
"""A number that was not measured is tried if it would be the best when it takes this fraction less
than expected."""
HOPE_WITHOUT_PROFILE = 0.45
"""The same if the expectation rests only on a few steps, which do not show how much nodes disturb
each other."""
MEASURED_FOR_S = 60.0
"""A number measured longer ago may be tried again."""
_NEW = 0.2
"""Weight of the newest step among steps with the same number of requests."""
ALIKE = 1.5
"""A measurement with up to this factor more or fewer requests need not be repeated."""


@dataclass(frozen=True, slots=True)
class _Formed:
    """A step in flight: of `parts` micro-batches of `count` requests."""

    parts: int
    count: int
    decodes: int
    prompt_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _Measured:
    """The mean of `times` measurements, the newest at `at_s`."""

    seconds: float
    at_s: float
    times: int = 1


class MeasuredSteps:
    """Stage and hop times of a pipeline without profiles, from the steps that it runs."""

    def __init__(self) -> None:
        self._stages: dict[int, list[float]] = {}
        self._hops_s: float | None = None

    def saw(self, rows: int, timings: Sequence[StageTiming], round_s: float) -> None:
        """A step of `rows` decodes returned `round_s` after it was formed."""
        if not timings:
            return
        computed = [timing.compute_s for timing in timings]
        hops_s = max(0.0, round_s - sum(timing.wait_s + timing.compute_s for timing in timings))
        former_seconds = self._stages.get(rows)
        if former_seconds is None or len(former_seconds) != len(computed):
            self._stages[rows] = computed
        else:
            self._stages[rows] = [
                old + _NEW * (new - old) for old, new in zip(former_seconds, computed, strict=True)
            ]
        self._hops_s = (
            hops_s if self._hops_s is None else self._hops_s + _NEW * (hops_s - self._hops_s)
        )

    def inter_token_s(self, rows: int, in_flight: int) -> float | None:
        """max(R, m B) for `in_flight` steps of `rows` decodes each; None before any step was seen.

        Between two numbers of decodes that were seen, times are on the line through them; beyond
        them they stay, since a small step mostly reads weights.
        """
        if not self._stages or self._hops_s is None:
            return None
        stages = self._at(rows)
        return max(sum(stages) + self._hops_s, in_flight * max(stages))

    def _at(self, rows: int) -> list[float]:
        below = max(
            (measured_rows for measured_rows in self._stages if measured_rows <= rows), default=None
        )
        above = min(
            (measured_rows for measured_rows in self._stages if measured_rows >= rows), default=None
        )
        if below is None or above is None or below == above:
            nearest = above if below is None else below
            assert nearest is not None
            return self._stages[nearest]
        share = (rows - below) / (above - below)
        pairs = zip(self._stages[below], self._stages[above], strict=True)
        return [low + share * (high - low) for low, high in pairs]


class MicroBatchTuner:
    """One pipeline's choice. `cost` is the profile's cost of a step; without one, observed steps
    replace it."""

    def __init__(self, batching: Batching, cost: InterTokenSeconds | None = None) -> None:
        self._batching = batching
        self._cost = cost
        self._steps = MeasuredSteps()
        self._formed: deque[_Formed] = deque()
        self._measured: dict[tuple[int, int], _Measured] = {}
        self.parts = 0
        """The number of micro-batches chosen last; 0 before anyone decoded."""
        self._count = 0
        self._before_trial = 0
        self._is_due = False
        self._now_s = 0.0
        self._round_began_s: float | None = None
        self._round_decodes = 0
        self._rounds: list[float] = []

    def micro_batches(self, pieces: Sequence[Piece]) -> int:
        """The number of micro-batches for requests that decode `pieces` next.

        The choice is reviewed when the number of requests changes, and when a setting has been
        measured.
        """
        count = len(pieces)
        most = min(self._batching.most_micro_batches, count)
        least = -(-count // self._batching.most_decodes)
        if self._batching.fixed or most <= least:
            self._change(max(1, most), count)
        elif count != self._count:
            self._settle(sorted(pieces, reverse=True), least, most)
        elif self._is_due:
            self._review(sorted(pieces, reverse=True), least, most)
        return self.parts

    def formed(self, decodes: int, prompt_tokens: int) -> None:
        """A step with `decodes` decodes was formed after the newest result."""
        self._formed.append(_Formed(self.parts, self._count, decodes, prompt_tokens, self._now_s))

    def returned(self, timings: Sequence[StageTiming], now_s: float) -> None:
        """Take the oldest step back; its stages took `timings`."""
        step, self._now_s = self._formed.popleft(), now_s
        if step.prompt_tokens or (
            step.decodes and (step.parts, step.count) != (self.parts, self._count)
        ):
            self._forget_rounds()
        elif step.decodes:
            self._steps.saw(step.decodes, timings, now_s - step.at_s)
            self._count_round(step.decodes, now_s)

    # -- measuring ---------------------------------------------------------------------------------

    def _forget_rounds(self) -> None:
        self._round_began_s = None
        self._rounds.clear()

    def _count_round(self, decodes: int, now_s: float) -> None:
        if self._round_began_s is None:
            self._round_began_s, self._round_decodes = now_s, 0
            return
        self._round_decodes += decodes
        if self._round_decodes < self._count:
            return
        self._rounds.append(now_s - self._round_began_s)
        self._round_began_s, self._round_decodes = now_s, 0
        if len(self._rounds) > ROUNDS:
            self._note(median(self._rounds[1:]), now_s)
            # the next ones follow it without a change between them
            self._rounds = self._rounds[-1:]
            self._is_due = True

    def _note(self, seconds: float, now_s: float) -> None:
        measurement, times = self._measured.get((self.parts, self._count)), 1
        if measurement is not None and now_s - measurement.at_s < MEASURED_FOR_S:
            times = min(measurement.times + 1, MEANS_OVER)
            seconds = measurement.seconds + (seconds - measurement.seconds) / times
        self._measured[self.parts, self._count] = _Measured(seconds, now_s, times)

    # -- choosing ----------------------------------------------------------------------------------

    def _change(self, parts: int, count: int) -> None:
        if (parts, count) != (self.parts, self._count):
            self.parts, self._count = parts, count
            self._forget_rounds()
        self._is_due = False

    def _settle(self, longest: Sequence[Piece], least: int, most: int) -> None:
        """Requests joined or left: the best by all that is known, the former choice if it is as
        good."""
        count = len(longest)
        expected = {
            parts: self._expected_s(parts, count, longest) for parts in range(least, most + 1)
        }
        self._before_trial = 0
        former = self.parts if self.parts in expected else most
        seconds_by_parts = {
            parts: seconds for parts, seconds in expected.items() if seconds is not None
        }
        if not seconds_by_parts:
            self._change(most, count)
            return
        # The largest of equal ones: smaller batches leave more room for prompts' chunks.
        best = min(
            sorted(seconds_by_parts, reverse=True), key=lambda parts: seconds_by_parts[parts]
        )
        keeps = (
            bool(self._measured)
            and former in seconds_by_parts
            and seconds_by_parts[best] > (1 - BETTER) * seconds_by_parts[former]
        )
        self._change(former if keeps else best, count)

    def _review(self, longest: Sequence[Piece], least: int, most: int) -> None:
        """The present choice was measured: continue with the best measured one, or try another."""
        count, choices = len(longest), range(least, most + 1)
        measured = {
            parts: seconds
            for parts in choices
            if self._is_measured(parts, count)
            and (seconds := self._expected_s(parts, count, longest)) is not None
        }
        standing = self._before_trial if self._before_trial in measured else self.parts
        best = min(measured, key=lambda parts: measured[parts])
        if measured[best] > (1 - BETTER) * measured[standing]:
            best = standing
        self._before_trial = 0
        untried = [parts for parts in choices if parts not in measured]
        hopes = {
            parts: self._expected_s(parts, count, longest, hope=True) or 0.0 for parts in untried
        }
        trial = min(hopes, key=lambda parts: hopes[parts], default=best)
        hope = HOPE if self._cost is not None else HOPE_WITHOUT_PROFILE
        if trial != best and (1 - hope) * hopes[trial] < measured[best]:
            self._before_trial, best = best, trial
        self._change(best, count)

    def _is_measured(self, parts: int, count: int) -> bool:
        """Whether this number was measured lately, with about as many requests; without a profile,
        with as many."""
        alike = ALIKE if self._cost is not None else 1.0
        return any(
            of == parts
            and max(count, others) <= alike * min(count, others)
            and self._is_new(measured)
            for (of, others), measured in self._measured.items()
        )

    def _is_new(self, measured: _Measured) -> bool:
        return self._now_s - measured.at_s < MEASURED_FOR_S

    def _expected_s(
        self, parts: int, count: int, longest: Sequence[Piece], *, hope: bool = False
    ) -> float | None:
        """Seconds between two tokens: as measured, or measured with another number of requests and
        scaled by the model. With `hope`, old measurements are ignored.

        The slowdown of nodes against the model depends on how many of them work at once. So a
        measurement with another number of micro-batches counts only if the nodes were quicker than
        the model.
        """
        modelled = self._modelled_s(parts, count, longest)
        own = [
            others
            for (of, others), measured in self._measured.items()
            if of == parts and (not hope or self._is_new(measured))
        ]
        if own:
            nearest = min(own, key=lambda others: max(count, others) / min(count, others))
            seconds = self._measured[parts, nearest].seconds
            before = self._modelled_s(parts, nearest, longest)
            return (
                seconds
                if nearest == count or modelled is None or not before
                else seconds * modelled / before
            )
        if modelled is None:
            return None
        measurements = [
            (measured.seconds, self._modelled_s(*key, longest))
            for key, measured in self._measured.items()
        ]
        return modelled * min(
            [1.0, *(seconds / before for seconds, before in measurements if before)]
        )

    def _modelled_s(self, parts: int, count: int, longest: Sequence[Piece]) -> float | None:
        decodes = -(-count // parts)
        if self._cost is None:
            return self._steps.inter_token_s(decodes, parts)
        # The slowest micro-batch counts, assumed to be the one with the longest contexts.
        return self._cost(
            [longest[min(index, len(longest) - 1)] for index in range(decodes)], parts
        )
