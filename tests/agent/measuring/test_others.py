"""Other processes' use of a node's cores: as values, and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from edgeshard_agent.measuring.others import OthersWatch, Reading, others_share, read_cores

pytestmark = pytest.mark.timing

FOUR = frozenset(range(4))


def reading(total_s: float, busy_s: float, own_s: float, cores: frozenset[int] = FOUR) -> Reading:
    return Reading(cores, total_s, busy_s, own_s)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "threads", "share"),
    [
        (10.0, 10.0, 4, 0.0),
        (20.0, 10.0, 4, 0.25),  # ten seconds of the forty that four cores have in ten
        (40.0, 10.0, 4, 0.75),
        (20.0, 10.0, 2, 0.0),  # one core's worth, and two were free
        (40.0, 10.0, 2, 0.5),  # three cores' worth: one of the two
        (10.0, 10.4, 4, 0.0),  # the clocks differ a little
        (40.0, 0.0, 99, 1.0),
    ],
)
def test_what_others_took_beyond_the_free_cores(
    busy_s: float, own_s: float, threads: int, share: float
) -> None:
    before, after = reading(100.0, 50.0, 7.0), reading(140.0, 50.0 + busy_s, 7.0 + own_s)
    assert others_share(before, after, threads) == pytest.approx(share)


def test_other_cores_than_before_tell_nothing() -> None:
    assert others_share(reading(1.0, 1.0, 0.0), reading(9.0, 9.0, 0.0, frozenset({1})), 1) == 0.0
    assert others_share(reading(1.0, 1.0, 0.0), reading(1.0, 1.0, 0.0), 1) == 0.0


def test_cores_are_those_the_process_may_use() -> None:
    first = read_cores()
    assert 0 < len(first.cores) <= (os.cpu_count() or 1)
    assert 0 <= first.busy_s <= first.total_s
    sum(range(3_000_000))
    then = read_cores()
    assert then.own_s > first.own_s and then.total_s >= first.total_s


def test_a_busy_neighbour_is_seen_and_ones_own_work_is_not() -> None:
    watch = OthersWatch(len(read_cores().cores))
    assert watch.share() == 0.0, "nothing is known yet"
    spin = "import time\nprint(flush=True)\nwhile True: pass"
    neighbours = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
        for _ in range(len(read_cores().cores))
    ]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()  # it spins from here on
        begun, deadline = read_cores(), time.monotonic() + 60
        while others_share(begun, read_cores(), len(begun.cores)) < 0.2 or watch.share() < 0.2:
            assert time.monotonic() < deadline, "one process for each core, and none was seen"
            time.sleep(0.05)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
