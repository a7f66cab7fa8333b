"""Measuring layers in a process of its own, started by `measuring_process.py`.

Run it as `python -m edgeshard_agent.measuring.measuring_worker`. One line of JSON comes in, the
job. Lines of JSON go out: progress, and at last the profile or an error. The process ends when its
input does, so that it never outlives the agent that started it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.profile import ComputeProfile, Effort
from edgeshard.forms import OWN
from edgeshard.process.parent import end_with
from edgeshard_agent.measuring.stops import Stops, count_stops, no_stops

_NICE = 10
PROGRESS_INTERVAL_S = 0.25
"""Minimum time between two reports of progress: a figure may take a millisecond."""


@dataclass(frozen=True, slots=True)
class MeasuringJob:
    """The model to measure, and how. `memory` is the number of bytes it may use, None if it may use
    all of the node's memory.
    """

    config: Mapping[str, Any]
    dtype: DType
    device: str
    threads: int
    effort: Effort
    memory: int | None
    quantisation: Quantisation | None = None
    beside_stages: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """One line of the process's output: its progress (figures done, figures in total, the current
    figure), the profile, or the reason why there is none."""

    progress: tuple[int, int, str] | None = None
    profile: ComputeProfile | None = None
    error: EdgeShardError | None = None


def main() -> None:
    end_with(int(sys.argv[1]) if len(sys.argv) > 1 else None)  # also while it is stopped
    # A library's prints must not come between the messages.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = OWN.from_text(MeasuringJob, sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    _give_way(job)
    try:
        _say(out, Told(profile=measured(job, _throttled(out), count_stops())))
    except EdgeShardError as error:
        _say(out, Told(error=error))


def measured(
    job: MeasuringJob, progress: Callable[[str, int, int], None], stops: Stops = no_stops
) -> ComputeProfile:
    """The profile of a model, measured by this thread. Raises what `Profiler.run` raises."""
    # After the job is read: importing torch takes seconds, and the agent may change its mind
    # meanwhile.
    import torch

    from edgeshard.profiles.grid import GRIDS
    from edgeshard_agent.measuring.compute import Profiler
    from edgeshard_agent.measuring.rotation import LayerForm

    torch.set_num_threads(job.threads)
    form, grid = LayerForm(job.config, job.dtype, job.device, job.quantisation), GRIDS[job.effort]
    profiler = Profiler(
        form, job.threads, grid, memory_limit_bytes=job.memory, progress=progress, stops=stops
    )
    return replace(profiler.run(), beside_stages=job.beside_stages)


def _throttled(out: TextIO) -> Callable[[str, int, int], None]:
    last = float("-inf")

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_INTERVAL_S:
            last = time.monotonic()
            _say(out, Told(progress=(done, total, what)))

    return tell


def _say(out: TextIO, message: Told) -> None:
    out.write(OWN.to_text(Told, message) + "\n")
    out.flush()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _give_way(job: MeasuringJob) -> None:
    """Let the kernel end this process instead of the agent if memory runs out. If stages run, give
    it the lowest priority for cores, so that the work before a request's first step is not delayed
    either."""
    if job.beside_stages:
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


if __name__ == "__main__":
    main()
