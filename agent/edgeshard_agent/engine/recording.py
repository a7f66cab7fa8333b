"""Records of a stage's work: always how busy it is, and each step's times during a trace."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from edgeshard.domain.clock import Clock
from edgeshard.domain.requests.step import StepPlan
from edgeshard.domain.requests.trace import MOST_RECORDS, ReadRecord, StepRecord
from edgeshard.metrics.histogram import STEP_S, Histogram

BUSY_WINDOW_S = 1.0


class BusyMeter:
    """The fraction of the last one to two seconds that was spent computing; all times are from one
    clock."""

    def __init__(self, now: float) -> None:
        self._busy_s = 0.0
        # Readings (time, seconds computed until then): the share is counted from the older one on.
        self._older = self._newer = (now, 0.0)

    def add(self, seconds: float) -> None:
        self._busy_s += seconds

    def share(self, now: float) -> float:
        since, busy_s = self._older
        share = min(1.0, (self._busy_s - busy_s) / max(now - since, 1e-9))
        if now - self._newer[0] >= BUSY_WINDOW_S:
            self._older, self._newer = self._newer, (now, self._busy_s)
        return share


class StepCounts:
    """Histograms of seconds: how long the steps of a stage took, waited, and let it idle."""

    def __init__(self) -> None:
        self.steps = Histogram(STEP_S)
        self.waits = Histogram(STEP_S)
        self.bubbles = Histogram(STEP_S)
        self._ended_s: float | None = None

    def ran(self, arrived_s: float, began_s: float, ended_s: float) -> None:
        """A step was computed; all times are from one clock."""
        self.steps.add(ended_s - began_s)
        self.waits.add(max(0.0, began_s - arrived_s))
        if self._ended_s is not None:
            self.bubbles.add(max(0.0, arrived_s - self._ended_s))
        self._ended_s = ended_s


class StepRecorder:
    """The newest steps of a stage, in their order, at most `most`, and as many reads of its
    weights. Calls about other steps are ignored. `read` may be called on another thread than the
    others."""

    def __init__(self, clock: Clock, most: int = MOST_RECORDS) -> None:
        self._clock = clock
        self._most = most
        self._records: dict[int, StepRecord] = {}
        self._came: dict[int, float] = {}
        """When steps came that are not computed yet."""
        self._reads: deque[ReadRecord] = deque(maxlen=most)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(self._records.values())

    @property
    def reads(self) -> tuple[ReadRecord, ...]:
        return tuple(self._reads)

    def read(
        self, layer: int, size_bytes: int, began_s: float, ended_s: float, expert: int | None = None
    ) -> None:
        """Weights of a layer, or of one of its experts, were read; times are from the recorder's
        clock."""
        self._reads.append(ReadRecord(layer, size_bytes, began_s, ended_s, expert))

    def ran(
        self, step: int, plan: StepPlan, arrived_s: float, began_s: float, ended_s: float
    ) -> None:
        """A step was computed, and is about to be sent. A span of one token, and the guesses after
        it, is a decode."""
        prompt_tokens = sum(
            span.token_count for span in plan.spans if span.token_count > 1 + span.guesses
        )
        guesses = sum(span.guesses for span in plan.spans)
        if len(self._records) >= self._most:
            del self._records[next(iter(self._records))]
        times = arrived_s, began_s, ended_s, ended_s
        came_s = self._came.pop(step, 0.0)
        record = StepRecord(
            step, plan.token_count, prompt_tokens, *times, guesses=guesses, came_s=came_s
        )
        self._records[step] = record

    def now(self) -> float:
        return self._clock.now()

    def came(self, step: int, at_s: float) -> None:
        """The last frame of the step, or of its result, was there at `at_s` of the recorder's
        clock."""
        record = self._records.get(step)
        if record is not None:
            self._records[step] = replace(record, came_s=at_s)
        elif len(self._came) < self._most:
            self._came[step] = at_s

    def sent(self, step: int) -> None:
        """The step's last frame is handed to the link now; only the first time counts."""
        record = self._records.get(step)
        if record is not None and record.sent_s == record.ended_s:
            self._records[step] = replace(record, sent_s=self._clock.now())

    def returned(self, step: int, right_guesses: int) -> None:
        """The head has the step's result now; `right_guesses` guesses were right."""
        record = self._records.get(step)
        if record is not None:
            right = min(right_guesses, record.guesses)
            self._records[step] = replace(record, returned_s=self._clock.now(), right_guesses=right)
