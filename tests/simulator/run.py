"""Run seeds of the simulator. One that fails is printed, and the exit code is 1.

`--first SEED --seeds 1 --trace` runs one of them again and prints what happens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulator.coverage import minima, missed, strange
from tests.simulator.setup import collected, say, steady, work_alone

PIECE = 50
"""Seeds that a process runs at a time."""


@dataclass
class Sums:
    """The sums of some seeds."""

    failed: list[tuple[int, float, str]] = field(default_factory=list)
    met: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    virtual_s: float = 0.0
    requests: int = 0

    def add(self, other: Sums) -> None:
        self.failed += other.failed
        self.met.update(other.met)
        self.virtual_s += other.virtual_s
        self.requests += other.requests


def run_piece(first: int, count: int, trace: bool, quiet: bool, lies: bool) -> Sums:
    sums = Sums()
    for outcome in collected(range(first, first + count), trace, quiet, lies):
        sums.met.update(outcome.met.keys())
        sums.virtual_s += outcome.virtual_s
        sums.requests += outcome.finished
        if outcome.violations:
            sums.failed.append((outcome.seed, outcome.virtual_s, outcome.violations[0]))
            say(f"seed {outcome.seed} at {outcome.virtual_s:.3f} s: {outcome.violations[0]}")
    return sums


def run_all(options: argparse.Namespace) -> Sums:
    end = options.first + options.seeds
    how = options.trace, options.quiet, options.lies
    pieces = [(at, min(PIECE, end - at), *how) for at in range(options.first, end, PIECE)]
    sums = Sums()
    if options.jobs == 1:
        for piece in pieces:
            sums.add(run_piece(*piece))
        return sums
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        for done in pool.map(run_piece, *zip(*pieces, strict=True)):
            sums.add(done)
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many (500)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (1)")
    parser.add_argument(
        "--coverage", action="store_true", help="fail, too, if something was met too seldom"
    )
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--quiet", action="store_true", help="nothing goes wrong")
    parser.add_argument(
        "--lies", action="store_true", help="a lying node in each run, not only in some"
    )
    options = parser.parse_args()
    work_alone(options.trace)
    began = time.perf_counter()
    sums = run_all(options)
    took = time.perf_counter() - began
    say(
        f"{options.seeds} seeds in {took:.1f} s, {len(sums.failed)} failed: {sums.virtual_s:.0f} s "
        "of simulated time, "
        f"{sums.requests} requests"
    )
    amiss = [*(missed(sums.met, options.seeds) if options.coverage else ()), *strange(sums.met)]
    for line in [*minima(sums.met), *amiss]:
        say(line)
    if sums.failed:
        seed = sums.failed[0][0]
        say(f"again: python -m tests.simulator.run --first {seed} --seeds 1 --trace")
    return 1 if sums.failed or amiss else 0


if __name__ == "__main__":
    steady("tests.simulator.run")
    sys.exit(main())
