"""Lines that repeat too often are left out and counted, in the pure core and in a daemon's
output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.process.logs import (
    MAX_TRACEBACK_CHARACTERS,
    MAX_VALUE_CHARACTERS,
    Folds,
    shorten_traceback,
    shorten_values,
)

NAMES = ("accept", "refused", "joined")
lines = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.sampled_from([0.0, 0.0, 1.0, 30.0, 61.0]), st.integers(1, 250)
    ),
    max_size=12,
)


@settings(deadline=None)
@given(lines)
def test_each_line_is_written_or_counted_and_few_are_written(
    came: list[tuple[str, float, int]],
) -> None:
    folds, now = Folds(), 0.0
    made: Counter[str] = Counter()
    written: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for name, wait, count in came:
        now += wait
        for _ in range(count):
            counted.update(dict(folds.over(now)))
            made[name] += 1
            if folds.passes(name, now):
                written[name] += 1
                times[name].append(now)
    counted.update(dict(folds.over(now + Folds.PERIOD_S)))
    assert all(made[name] == written[name] + counted[name] for name in NAMES)
    for name in NAMES:
        assert min(made[name], Folds.MOST_LINES) <= written[name]
        beginning = now - Folds.PERIOD_S
        assert sum(at > beginning for at in times[name]) <= 2 * Folds.MOST_LINES


def test_names_without_end_are_one_name() -> None:
    folds = Folds()
    written = sum(folds.passes(f"name-{number}", 0.0) for number in range(10_000))
    assert written == Folds.MOST_NAMES + Folds.MOST_LINES
    assert folds.over(Folds.PERIOD_S) == [("others", 10_000 - written)]


SCRIPT = """
import logging
import structlog
from edgeshard.process import logs
from edgeshard.process.logs import Folds
logs.configure_logging("debug")
Folds.PERIOD_S = 0.2
ours, others = structlog.get_logger("edgeshard"), logging.getLogger("asyncio")
for number in range(5000):
    try:
        raise OSError(24, "Too many open files")
    except OSError as error:
        others.error("socket.accept() out of system resource\\nsocket: %d" % number, exc_info=error)
for number in range(300):
    ours.debug("looked", number=number)
    ours.warning("refused", number=number)
import time
time.sleep(0.3)
ours.info("later")
"""


def test_a_daemon_that_cannot_accept_says_so_in_kilobytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, timeout=60, check=True, text=True
    )
    events = [json.loads(line) for line in done.stderr.splitlines()]
    names = Counter(event["event"].partition("\n")[0] for event in events)
    assert names["looked"] == 300 and names["later"] == 1
    assert 100 <= names["socket.accept() out of system resource"] <= 1000
    assert len(done.stderr) < 500_000
    left_out: Counter[str] = Counter()
    for event in events:
        if event["event"] == "lines_suppressed":
            left_out[event["of"]] += event["lines"]
    for name, made in (("refused", 300), ("socket.accept() out of system resource", 5000)):
        assert names[name] + left_out[name] == made


def test_a_text_in_a_line_is_cut() -> None:
    """A node or a client may have sent it."""
    line = shorten_values(
        None, "info", {"event": "link_reported", "why": "x" * 8_000_000, "hop": 3}
    )
    assert line == {
        "event": "link_reported",
        "why": "x" * MAX_VALUE_CHARACTERS + "... (8000000 characters)",
        "hop": 3,
    }


def test_a_list_and_a_table_in_a_line_are_cut() -> None:
    line = shorten_values(
        None, "info", {"event": "x", "names": ["x" * 50] * 1000, "shares": {"a": 1.0}, "up": None}
    )
    assert line["names"].startswith("['xxx") and line["names"].endswith("... (54000 characters)")
    assert len(line["names"]) < MAX_VALUE_CHARACTERS + 30
    assert (line["shares"], line["up"]) == ({"a": 1.0}, None)


def test_the_middle_of_a_long_traceback_is_cut() -> None:
    text = "Traceback" + "x" * 8_000_000 + "ValueError"
    line = shorten_traceback(None, "error", {"event": "failed", "exception": text})
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError")
    assert len(line["exception"]) < MAX_TRACEBACK_CHARACTERS + 50
    assert shorten_traceback(None, "error", {"event": "failed"}) == {"event": "failed"}
