"""The times of a process's restarts: growing pauses, a limited number of starts, and no restart if
it cannot start."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from edgeshard.local.child_daemons import MOST_STARTS, WINDOW_S, Restarts

KILLED = -signal.SIGKILL


def starts_of(lives_s: list[float], *, in_vain: bool = False) -> list[float]:
    """The times of its starts, if it lives this long each time; the last entry is infinite once it
    is given up."""
    restarts = Restarts()
    now_s = 0.0
    starts = [0.0]
    restarts.started(now_s)
    for life_s in lives_s:
        now_s += life_s
        pause_s = restarts.pause_s(now_s, KILLED, in_vain)
        if pause_s is None:
            return [*starts, math.inf]
        now_s += pause_s
        restarts.started(now_s)
        starts.append(now_s)
    return starts


def test_pauses_double_and_begin_anew_after_a_quiet_minute() -> None:
    restarts = Restarts()
    for start_s, pause_s in ((0.0, 0.5), (1.0, 1.0), (2.0, 2.0), (100.0, 0.5)):
        restarts.started(start_s)
        assert restarts.pause_s(start_s, KILLED, in_vain=False) == pause_s
    assert restarts.pause_s(100.0 + WINDOW_S, KILLED, in_vain=False) == 0.25


@given(st.lists(st.floats(0, 100), max_size=40))
def test_it_comes_back_always_and_at_most_five_times_a_minute(lives_s: list[float]) -> None:
    starts = starts_of(lives_s)
    assert len(starts) == len(lives_s) + 1 and math.inf not in starts
    for first, later in zip(starts, starts[MOST_STARTS:], strict=False):
        assert later - first >= WINDOW_S - 1e-9


def test_what_comes_to_nothing_is_given_up_and_one_good_start_forgives() -> None:
    assert starts_of([0.1] * 9, in_vain=True)[MOST_STARTS:] == [math.inf]
    restarts = Restarts()
    for _ in range(3):
        for _ in range(MOST_STARTS - 1):
            assert restarts.pause_s(0.0, 1, in_vain=True) is not None
        assert restarts.pause_s(0.0, KILLED, in_vain=False) is not None


def test_denied_is_denied() -> None:
    assert Restarts().pause_s(0.0, 4, in_vain=False) is None


CHILD = """
import os, sys
from edgeshard.process.parent import end_with
end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdin=int(sys.argv[1])
)
child.wait()
"""


def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    held, kept = os.pipe()  # `kept` stays open here: the child's input does not end
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(held)], stdout=subprocess.PIPE, pass_fds=(held,)
    )
    assert parent.stdout is not None
    try:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.wait(30)
        assert parent.stdout.read() == b"", "it ends when no process has it any more"
    finally:
        parent.kill()
        for descriptor in (held, kept):
            os.close(descriptor)


def test_a_child_whose_parent_has_ended_before_it_asks_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (KILLED, b"")
