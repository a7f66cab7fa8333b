"""How long the solvers take, and how far from the optimum they may be at most, on many boxes.

    python -m bench.planner [-o FILE] [--seeds 20]

Rows of JSON, one a solve: the problem, seconds, value, proven bound, gap, stages. Two families of 80 layers each
(`bench.instances`): a thousand boxes in four classes, where the class DP is exact; and a hundred boxes with any link
matrix and memory for 1.5x the layers, where the label DP certifies a gap. The last row is the summary with the limits
that were set, and the exit code is 1 when one is broken.

pytest-benchmark measures the same problems: `pytest bench/planner.py --benchmark-only -o python_files=planner.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.instances import LAYERS, arbitrary, classed
from edgeshard.planning.instance import Instance, Solution
from edgeshard.planning.solvers import solve_latency, solve_throughput

CLASS_SIZES = ((250, 250, 250, 250), (10, 40, 150, 800), (15, 25, 30, 930))
# Room for this many layers in a box, about: at 1 nearly every layer is a hop, which is the hardest.
CLASS_ROOMS = (1.0, 2.0, 4.0, 10.0)
# The paper's classes are few; (b, m) are chosen together by trying many, so each must be quick.
MICRO_BATCHES = 8
CLASS_LIMIT_S = 1.0
ARBITRARY_LIMIT_S = 20.0
GAP_LIMIT = 0.05
# Of twenty seeds as many may miss the gap.
MISSES_OF_TWENTY = 2

Row = dict[str, Any]
Case = tuple[str, Callable[[], Instance]]


def class_cases() -> Iterator[Case]:
    for sizes in CLASS_SIZES:
        for room in CLASS_ROOMS:
            name = f"{sum(sizes)} boxes in classes of {'/'.join(map(str, sizes))}, room {room:g}"
            yield name, lambda sizes=sizes, room=room: classed(0, sizes, room)  # type: ignore[misc]


def arbitrary_cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        yield f"100 boxes, any links, seed {seed}", lambda seed=seed: arbitrary(seed)  # type: ignore[misc]


def solve(instance: Instance, objective: str) -> Solution | None:
    return solve_latency(instance) if objective == "latency" else solve_throughput(instance, MICRO_BATCHES)


def measure(family: str, case: Case, objective: str) -> Row:
    name, make = case
    instance = make()
    start = time.perf_counter()
    found = solve(instance, objective)
    seconds = time.perf_counter() - start
    row: Row = {"family": family, "case": name, "objective": objective, "layers": LAYERS, "seconds": round(seconds, 4)}
    if found is None:
        return row | {"feasible": False}
    return row | {
        "feasible": True,
        "value_s": found.value_s,
        "bound_s": found.bound_s,
        "gap": round(found.gap, 6),
        "stages": len(found.cut.boxes),
        "bottleneck": found.score.bottleneck,
    }


def summary(rows: list[Row], seeds: int) -> Row:
    """The limits of issue terms: seconds of either family, gaps of the second."""
    classes = [row for row in rows if row["family"] == "classes"]
    free = [row for row in rows if row["family"] == "arbitrary"]
    latency = [row for row in free if row["objective"] == "latency"]
    allowed = MISSES_OF_TWENTY * seeds // 20
    missed = {
        objective: sum(row.get("gap", 1.0) > GAP_LIMIT for row in free if row["objective"] == objective)
        for objective in ("latency", "throughput")
    }
    checks = {
        "classes_exact": all(row.get("gap") == 0 for row in classes),
        "classes_seconds": max((row["seconds"] for row in classes), default=0.0) < CLASS_LIMIT_S,
        "arbitrary_seconds": max((row["seconds"] for row in free), default=0.0) < ARBITRARY_LIMIT_S,
        "arbitrary_gaps": max(missed.values()) <= allowed,
    }
    return {
        "family": "summary",
        "classes_worst_s": max((row["seconds"] for row in classes), default=None),
        "arbitrary_worst_s": max((row["seconds"] for row in free), default=None),
        "arbitrary_gaps_above_limit": missed,
        "latency_gaps": sorted(row.get("gap", 1.0) for row in latency),
        "checks": checks,
        "ok": all(checks.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the planner's solvers.")
    parser.add_argument("-o", "--output", type=Path, help="write the rows here as well, as one JSON list")
    parser.add_argument("--seeds", type=int, default=20, help="arbitrary link matrices to solve")
    options = parser.parse_args()
    rows: list[Row] = []
    families = (("classes", list(class_cases())), ("arbitrary", list(arbitrary_cases(options.seeds))))
    for family, cases in families:
        for case in cases:
            for objective in ("latency", "throughput"):
                rows.append(measure(family, case, objective))
                print(json.dumps(rows[-1]), flush=True)
    rows.append(summary(rows, options.seeds))
    print(json.dumps(rows[-1]))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows[-1]["ok"] else 1


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("case", [*class_cases(), *arbitrary_cases(3)], ids=lambda case: case[0])
def test_solver(benchmark: Any, case: Case, objective: str) -> None:
    """For pytest-benchmark: one round each, the solvers have no chance in them."""
    instance = case[1]()
    found = benchmark.pedantic(solve, args=(instance, objective), rounds=1)
    assert found is not None
    benchmark.extra_info["gap"] = found.gap


if __name__ == "__main__":
    sys.exit(main())
