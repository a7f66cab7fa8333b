"""A measurement yields to steps: when it is stopped, continues and ends, in virtual time; and what
it drops."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.measuring.measuring_process import LONGEST_WAIT_S, QUIET_S, GivingWay
from edgeshard_agent.measuring.others import CoreMeter, Reading
from edgeshard_agent.measuring.stops import Stops, count_stops
from edgeshard_agent.measuring.stopwatch import Stopwatch
from hypothesis import example, given
from hypothesis import strategies as st

from edgeshard.profiles.grid import Repeats


@dataclass(eq=False)
class Timer:
    at: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Node:
    """A compute thread, an event loop and a process in virtual time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []
        self.on_steps: Callable[[], None] = lambda: None
        self.steps = 0
        self.ended_at = float("-inf")
        self.state = "R"
        self.told: list[bool] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        self.timers.append(Timer(self.now + delay, callback))
        return self.timers[-1]

    def without_steps_s(self) -> float:
        return 0.0 if self.steps else self.now - self.ended_at

    def send(self, number: signal.Signals) -> None:
        assert self.state != "X"
        self.state = {signal.SIGSTOP: "T", signal.SIGCONT: "R", signal.SIGKILL: "X"}[number]

    def step(self) -> None:
        self.on_steps()
        assert self.state != "R", "the thread gets the step only now"
        self.steps += 1

    def end(self) -> None:
        if self.steps:
            self.steps -= 1
            self.ended_at = self.now

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while due := min(
            (t for t in self.timers if t.at <= until and not t.cancelled),
            key=lambda t: t.at,
            default=None,
        ):
            self.timers.remove(due)
            self.now = due.at
            due.callback()
        self.now = until


@given(
    st.lists(
        st.one_of(
            st.just("step"),
            st.just("end"),
            st.floats(0.0, 3 * QUIET_S),
            st.floats(100.0, LONGEST_WAIT_S),
        ),
        max_size=40,
    ),
    st.floats(0.0, 2 * QUIET_S),
)
@example([1.5], 1.0)
def test_it_is_stopped_from_a_step_until_the_quiet_time_after_the_last(
    events: list[str | float], since: float
) -> None:
    node = Node()
    node.ended_at = node.now - since
    waited_s, longest_s = 0.0, 0.0
    with GivingWay(node, node, node.send, node.told.append) as way:
        assert node.state == ("T" if since < QUIET_S else "R")
        for event in events:
            before = node.state
            match event:
                case "step":
                    node.step()
                case "end":
                    node.end()
                case float():
                    node.wait(event)
                    longest_s += event
            if way.gave_up:
                break
            quiet = node.without_steps_s()
            assert node.state == "R" or quiet <= QUIET_S + 1e-6, "it waits for nothing"
            assert node.state == "T" or quiet >= QUIET_S - 1e-6, "it runs beside a request"
            if before == node.state == "T" and isinstance(event, float):
                waited_s += event
        assert len([timer for timer in node.timers if not timer.cancelled]) == (node.state == "T")
    assert node.told == [bool(number % 2 == 0) for number in range(len(node.told))]
    if way.gave_up:
        assert node.state == "X" and longest_s >= LONGEST_WAIT_S
    else:
        assert waited_s < LONGEST_WAIT_S + QUIET_S
    told = len(node.told)
    node.on_steps()
    node.wait(10 * QUIET_S)
    assert len(node.told) == told, "nobody is stopped afterwards"


def test_requests_that_never_leave_it_alone_end_it() -> None:
    node = Node()
    with GivingWay(node, node, node.send, node.told.append) as way:
        while not way.gave_up:
            node.step()
            node.wait(1.0)
            node.end()
            node.wait(QUIET_S + 0.5)
            assert node.now < 100.0 + 3 * LONGEST_WAIT_S
    assert node.state == "X" and node.now >= 100.0 + LONGEST_WAIT_S


def test_the_compute_thread_says_that_steps_come_before_it_has_them() -> None:
    worker = ComputeThread(1)
    seen = list[str]()
    go_on = threading.Event()
    assert worker.without_steps_s() == float("inf")
    worker.on_steps = lambda: seen.append("told")

    def step() -> None:
        seen.append("step")
        assert go_on.wait(60)

    worker.submit_steps(step)
    worker.submit_steps(seen.append, "step")
    assert seen[0] == "told" and worker.without_steps_s() == 0.0
    done = threading.Event()
    worker.submit(done.set)
    go_on.set()
    assert done.wait(60) and 0.0 <= worker.without_steps_s() < 60.0
    assert sorted(seen) == ["step", "step", "told", "told"]
    worker.close()


@contextmanager
def stopped_in(work: Callable[[], object]) -> Iterator[tuple[Stops, Callable[[], object]]]:
    """This process hears that it was stopped, in the second call of the work."""
    before = signal.getsignal(signal.SIGCONT)
    stops, calls = count_stops(), 0

    def called() -> None:
        nonlocal calls
        calls += 1
        work()
        if calls == 2:
            os.kill(os.getpid(), signal.SIGCONT)

    try:
        yield stops, called
    finally:
        signal.signal(signal.SIGCONT, before)


def test_a_repeat_across_a_stop_does_not_count() -> None:
    pauses = iter([0.0, 0.3, 0.0, 0.0, 0.0, 0.0])
    with stopped_in(lambda: time.sleep(next(pauses))) as (stops, work):
        taken = Stopwatch("cpu", stops).collect(work, Repeats(1, 5, 5, 10.0))
    assert len(taken) == 5 and max(taken) < 0.3 and stops() == 1 and not list(pauses)


def test_work_of_others_during_a_stop_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(
        [
            reading(0.0, 0.0),
            reading(10.0, 1.0),
            reading(90.0, 81.0),
            reading(100.0, 81.0),
            reading(110.0, 82.0),
        ]
    )
    monkeypatch.setattr("edgeshard_agent.measuring.others.read_cores", lambda: next(readings))
    stops = iter([0, 0, 1, 1, 1])
    meter = CoreMeter(1, lambda: next(stops))
    for _ in range(3):
        meter.lap()
    assert meter.share() == pytest.approx(2.0 / 30.0)


def reading(total_s: float, busy_s: float) -> Reading:
    return Reading(frozenset({0}), total_s, busy_s, 0.0)
