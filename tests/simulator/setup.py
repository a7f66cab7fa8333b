"""The needs of a process that runs seeds: the same order in each run, and no logs."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import structlog

from tests.simulator.loop import CURRENT
from tests.simulator.world import Outcome, World

COLLECTED_EVERY = 20


def steady(module: str) -> None:
    """Begin again unless sets of texts have the same order in each run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def work_alone(trace: bool = False) -> None:
    """For a process that does nothing else."""
    if trace:
        structlog.configure(
            processors=[_line], logger_factory=structlog.PrintLoggerFactory(sys.stdout)
        )
    else:
        quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
        structlog.configure(wrapper_class=quiet, cache_logger_on_first_use=True)
    warnings.simplefilter("ignore", RuntimeWarning)  # about tasks that a crash cut off
    sys.unraisablehook = lambda _: None


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def collected(
    seeds: Sequence[int], trace: bool = False, quiet: bool = False, lies: bool = False
) -> Iterator[Outcome]:
    """Run seeds. Python looks for garbage between them only: its moments would be part of a run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for count, seed in enumerate(seeds):
            yield World(seed, say if trace else None, quiet, lies).run()
            if count % COLLECTED_EVERY == 0:
                gc.collect()
    finally:
        gc.enable()


def _line(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """A line of a daemon's log, with the simulator's time and the process it is of."""
    process, error = CURRENT.get(None), event.pop("exc_info", None)
    if process is None:
        raise structlog.DropEvent  # the run is over, and Python clears up
    said = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
    if error is not None:
        said += "\n" + "".join(traceback.format_exception(*sys.exc_info()))
    return f"{process.loop.now:9.4f} {process.name}: {event['event']} {said}"
