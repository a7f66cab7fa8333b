"""A stage's records of its own work."""

from __future__ import annotations

import pytest
from edgeshard_agent.engine.recording import BusyMeter, StepRecorder

from edgeshard.domain.requests.step import SampledToken, Span, StepPlan, StepResult
from edgeshard.domain.requests.trace import ReadRecord


class HandClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_a_step_is_noted_from_its_arrival_to_its_return(clock: HandClock) -> None:
    recorder = StepRecorder(clock)
    recorder.ran(7, StepPlan(spans=(Span(1, 0, 5), Span(2, 9, 1))), 1.0, 1.5, 2.0)
    clock.time = 2.25
    recorder.sent(7)
    clock.time = 3.0
    recorder.returned(7, 0)
    (record,) = recorder.records
    assert (record.step, record.tokens, record.prompt_tokens) == (7, 6, 5)
    assert (record.arrived_s, record.began_s, record.ended_s, record.sent_s, record.returned_s) == (
        1,
        1.5,
        2,
        2.25,
        3,
    )


def test_guesses_are_noted_and_how_many_were_right(clock: HandClock) -> None:
    """The result of a step may bring a late token of another one."""
    recorder = StepRecorder(clock)
    recorder.ran(1, StepPlan(spans=(Span(1, 9, 4, guesses=3), Span(2, 0, 5))), 1.0, 1.5, 2.0)
    recorder.ran(2, StepPlan(spans=(Span(1, 12, 1),)), 2.0, 2.5, 3.0)
    assert [
        (record.tokens, record.prompt_tokens, record.guesses) for record in recorder.records
    ] == [
        (9, 5, 3),
        (1, 0, 0),
    ]
    tokens = [
        SampledToken(1, 10, 7),
        SampledToken(1, 11, 8),
        SampledToken(2, 5, 9),
        SampledToken(1, 12, 7),
    ]
    result = StepResult(tuple(tokens))
    recorder.returned(1, result.right_guesses)
    recorder.returned(2, 1)
    assert [record.right_guesses for record in recorder.records] == [2, 0]


def test_a_step_is_noted_to_have_come_before_it_was_computed_and_its_result_after(
    clock: HandClock,
) -> None:
    recorder = StepRecorder(clock)
    recorder.came(3, 0.75)
    recorder.ran(3, StepPlan(), 1.0, 1.5, 2.0)
    recorder.ran(4, StepPlan(), 2.0, 2.5, 3.0)
    assert [record.came_s for record in recorder.records] == [0.75, 0.0]
    recorder.came(4, 3.5)
    assert [record.came_s for record in recorder.records] == [0.75, 3.5]


def test_a_step_that_travels_nowhere_is_sent_when_it_ends(clock: HandClock) -> None:
    recorder = StepRecorder(clock)
    recorder.ran(0, StepPlan(), 1.0, 1.5, 2.0)
    assert recorder.records[0].sent_s == 2.0


def test_a_step_that_is_sent_again_keeps_its_time(clock: HandClock) -> None:
    recorder = StepRecorder(clock)
    recorder.ran(0, StepPlan(), 0.0, 0.0, 1.0)
    for clock.time in (2.0, 9.0):
        recorder.sent(0)
    assert recorder.records[0].sent_s == 2.0


def test_steps_of_before_the_trace_are_no_part_of_it(clock: HandClock) -> None:
    recorder = StepRecorder(clock)
    recorder.sent(3)
    recorder.returned(3, 0)
    assert recorder.records == ()


def test_the_newest_steps_are_kept(clock: HandClock) -> None:
    recorder = StepRecorder(clock, most=3)
    for step in range(8):
        recorder.ran(step, StepPlan(), 0.0, 0.0, 1.0)
    recorder.sent(0)
    assert [record.step for record in recorder.records] == [5, 6, 7]


def test_busy_is_the_share_of_the_last_seconds() -> None:
    meter = BusyMeter(100.0)
    meter.add(0.5)
    assert meter.share(101.0) == pytest.approx(0.5)
    meter.add(1.0)
    assert meter.share(102.0) == pytest.approx(0.75)
    # From here on the first half second is too long ago to count.
    assert meter.share(102.0) == pytest.approx(1.0)
    assert meter.share(104.0) == pytest.approx(1 / 3)
    assert meter.share(107.0) == pytest.approx(0.0)


def test_busy_does_not_depend_on_how_often_it_is_asked() -> None:
    meter = BusyMeter(0.0)
    found = []
    for tenth in range(1, 61):
        meter.add(0.05)
        found.append(meter.share(tenth / 10))
    assert found == [pytest.approx(0.5)] * 60


def test_the_newest_reads_are_kept_in_their_order(clock: HandClock) -> None:
    recorder = StepRecorder(clock, most=2)
    for layer in range(3):
        recorder.read(layer, 100, 1.0 + layer, 1.5 + layer)
    recorder.read(1, 50, 4.0, 4.5, 6)
    assert recorder.reads == (ReadRecord(2, 100, 3.0, 3.5), ReadRecord(1, 50, 4.0, 4.5, expert=6))
