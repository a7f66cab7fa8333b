"""What huge pages bring a decode step: a stage whose weights and KV pool lie in them, beside one in ordinary pages.

Both are 11 layers and the LM head of the tied random Llama (`bench/random_llama.py`) in bf16, in this process, on one
thread pinned to one core. The second is loaded while the kernel gives this process no huge pages
(`prctl(PR_SET_THP_DISABLE)`). They decode one stream in turns; a turn counts as the median of its steps. Linux only.

    python -m bench.huge_pages [--turns 7] [--layers 17:28] [--quantise int4] [--cpu-time]    JSON on stdout

With --cpu-time, steps are timed by the thread's own processor time, which leaves out what others do on the core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time

import torch
from edgeshard_agent.measuring.huge_pages import read_huge_pages

from bench.engine_stage import DecodingStage
from bench.random_llama import TIED_CONFIG
from bench.sizes import sized
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.model import LayerRange

PR_SET_THP_DISABLE = 41
CONTEXT, STEPS, TURN_S = sized((128, 24, 1.0), (16, 2, 0.0))


def allow_huge_pages(allowed: bool) -> None:
    """For this process, from now on; what is in memory stays as it is. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_THP_DISABLE, not allowed, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--layers", default="17:28", help="FIRST:END")
    parser.add_argument("--quantise", type=Quantisation.parse)
    parser.add_argument("--core", type=int, default=0, help="the core this process is pinned to")
    parser.add_argument("--cpu-time", action="store_true", help="time by the thread's processor time")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    first, end = map(int, options.layers.split(":"))
    stages, huge_bytes = {}, {}
    for name in ("ordinary", "huge"):
        allow_huge_pages(name == "huge")
        before = read_huge_pages()
        stages[name] = DecodingStage(LayerRange(first, end), options.quantise, 1, CONTEXT, STEPS, TIED_CONFIG, clock)
        after = read_huge_pages()
        assert before is not None and after is not None, "this system does not tell"
        huge_bytes[name] = after.held_bytes - before.held_bytes
    allow_huge_pages(False)  # the kernel would make ordinary pages huge meanwhile
    taken: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(options.turns):
        for name, stage in stages.items():
            taken[name].append(statistics.median(stage.decode(1, TURN_S)))
    ratios = [old / new for old, new in zip(taken["ordinary"], taken["huge"], strict=True)]
    result = {
        "benchmark": "huge_pages",
        "clock": "thread" if options.cpu_time else "wall",
        "layers": options.layers,
        "weights": options.quantise or "bf16",
        "huge_page_bytes": huge_bytes,
        "step_ms": {name: round(1e3 * statistics.median(times), 2) for name, times in taken.items()},
        "samples_ms": {name: [round(1e3 * time, 2) for time in times] for name, times in taken.items()},
        "ordinary_over_huge": round(statistics.median(ratios), 3),
        "load_1_minute": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
