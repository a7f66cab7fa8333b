"""A step that hangs, and steps that only take long."""

from __future__ import annotations

import pytest
from edgeshard_agent.core.hanging import (
    CHECK_S,
    LONGEST_GAP_S,
    STILL_S,
    TIMES_PREDICTED,
    RunningStep,
    Watched,
    hangs,
    looked_at,
)


class Eyes:
    """Looks at a step every `CHECK_S`; the first look gives no result yet."""

    def __init__(self, predicted_s: float = 0.0) -> None:
        self.now = 50.0
        self.age_s = self.cpu_s = 0.0
        self.number = 1
        self.predicted_s = predicted_s
        self.watched: Watched | None = None
        self.look()

    def look(self) -> bool:
        step = RunningStep(self.number, self.age_s, self.cpu_s, self.predicted_s)
        self.watched = looked_at(self.watched, step, self.now)
        return hangs(self.watched, step)

    def wait(self, seconds: float, cpu_share: float = 0.0) -> bool:
        """Whether the step counted as hanging at any look meanwhile."""
        found = False
        for _ in range(round(seconds / CHECK_S)):
            self.pass_by(CHECK_S, cpu_share)
            found |= self.look()
        return found

    def pass_by(self, seconds: float, cpu_share: float = 0.0) -> None:
        self.now += seconds
        self.age_s += seconds
        self.cpu_s += cpu_share * seconds


def test_a_step_without_progress_hangs_after_its_time() -> None:
    eyes = Eyes()
    assert not eyes.wait(STILL_S - CHECK_S)
    assert eyes.wait(CHECK_S)


def test_a_step_that_computes_never_hangs_however_long_it_takes() -> None:
    assert not Eyes().wait(20 * STILL_S, cpu_share=0.01)


def test_progress_begins_the_time_anew() -> None:
    eyes = Eyes()
    eyes.wait(STILL_S - CHECK_S)
    eyes.wait(CHECK_S, cpu_share=1.0)
    assert not eyes.wait(STILL_S - CHECK_S)
    assert eyes.wait(CHECK_S)


def test_another_step_begins_the_time_anew() -> None:
    eyes = Eyes()
    eyes.wait(STILL_S - CHECK_S)
    eyes.number, eyes.age_s = 2, 0.0
    assert not eyes.wait(STILL_S)
    assert eyes.wait(CHECK_S)


@pytest.mark.parametrize("predicted_s", [2.0, 5.0])
def test_a_step_is_given_many_times_what_it_should_take(predicted_s: float) -> None:
    eyes = Eyes(predicted_s)
    assert not eyes.wait(TIMES_PREDICTED * predicted_s)
    assert eyes.wait(CHECK_S)


def test_a_process_that_was_stopped_has_not_watched() -> None:
    """Neither it nor the compute thread ran meanwhile; a look that is only late counts."""
    eyes = Eyes()
    eyes.pass_by(10 * STILL_S)
    assert not eyes.look()
    assert not eyes.wait(STILL_S - CHECK_S)
    assert eyes.wait(CHECK_S)
    eyes = Eyes()
    for _ in range(round(STILL_S / LONGEST_GAP_S)):
        eyes.pass_by(LONGEST_GAP_S)
        found = eyes.look()
    assert found
