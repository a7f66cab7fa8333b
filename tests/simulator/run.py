"""Run seeds: `python -m tests.simulator.run --seeds 500`. A failure prints its seed and ends with exit code 1."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0" and __name__ == "__main__":
    # The order of sets of texts must not be part of a run.
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulator.run", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})

import structlog

from tests.simulator.coverage import minima, missed
from tests.simulator.loop import CURRENT
from tests.simulator.world import Collector, World


def _line(logger: object, method: str, event: dict[str, Any]) -> str:
    """A line of a daemon's log, with the simulator's time and the process it is of."""
    process, error = CURRENT.get(None), event.pop("exc_info", None)
    said = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
    if error is not None:
        said += "\n" + "".join(traceback.format_exception(*sys.exc_info()))
    if process is None:
        raise structlog.DropEvent  # the run is over, and Python clears up
    return f"{process.loop.now:9.4f} {process.name}: {event['event']} {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    options = parser.parse_args()
    if not options.trace:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=True)
    else:
        structlog.configure(processors=[_line], logger_factory=structlog.PrintLoggerFactory(sys.stdout))
    warnings.simplefilter("ignore", RuntimeWarning)  # of what a crash cut off
    sys.unraisablehook = lambda _: None
    began, failed, virtual, steps, finished = time.perf_counter(), 0, 0.0, 0, 0
    met: Counter[tuple[str, str, str]] = Counter()
    with Collector() as collector:
        for seed in range(options.first, options.first + options.seeds):
            outcome = World(seed, print if options.trace else None, options.quiet).run()
            virtual += outcome.virtual_s
            steps += outcome.steps
            finished += outcome.finished
            if outcome.violations:
                failed += 1
                print(f"seed {seed} at {outcome.virtual_s:.3f} s: {outcome.violations[0]}", flush=True)
            met.update(outcome.met.keys())
            collector.ran()
    took = time.perf_counter() - began
    print(f"{options.seeds} seeds in {took:.1f} s, {failed} failed; {virtual:.0f} s of virtual time, {steps} steps, {finished} requests")
    for line in minima(met):
        print(line)
    few = missed(met, options.seeds) if options.coverage else []
    for line in few:
        print(line)
    return 1 if failed or few else 0


if __name__ == "__main__":
    sys.exit(main())
