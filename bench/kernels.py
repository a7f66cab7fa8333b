"""How fast the CPU's compute operators are, compared with the machine's limits and with torch: one
thread on one core.

A pass runs the four matrices of a decoder block (hidden 1024, 16 heads, 8 KV heads of 64, inner
2816) in many copies. So weights come from memory and not from a cache, as they do when a model
decodes. The contenders take turns in every round. Each round also measures the limits of one
thread: the read rate of a stream from memory, and the rate of multiply-adds in float32. Rates are
of the median turn, and the best turn is printed as well.

    python -m bench.kernels [--quick] [-o FILE]
        a table on a terminal, else JSON; with -o both
    python -m bench.kernels --library A.so --library B.so --kernels avx2
        compiled libraries in turns

Rows of `op` "linear": `weights_gb_per_s` is bytes of weights and scales read, `gflop_per_s` counts
two operations for a weight and row, `ratio_to_torch` is how many times faster than
`torch.nn.functional.linear` in bfloat16. `share_of_read` (one row) and `share_of_fma` (more rows)
are shares of the limits; products of integers can exceed the second, because one instruction does
more of them. Other rows: one call, compared with the same in torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.measuring.machine_facts import processor_name
from edgeshard_agent.ops import native
from edgeshard_agent.ops.quantize import Scheme

from bench.kernel_calls import CallRow, call_rows, chunk_rows
from bench.kernel_libraries import Library, LibraryError, library_of_checkout, open_library
from bench.kernel_linear import COPIES, SCHEMES, LinearRow, Matrices, linear_rows
from bench.sizes import sized

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 8)
ROUNDS, QUICK_ROUNDS = 15, sized(5, 1)


def libraries_of(paths: Sequence[Path], kernels: str | None) -> list[Library]:
    """The libraries of `paths`, which take turns, or the checkout's own. Raises LibraryError."""
    if paths:
        return [open_library(path, kernels) for path in paths]
    return [library_of_checkout(kernels)]


def library_for_limits(libraries: Sequence[Library]) -> Library:
    """The first library that measures the machine's limits; the checkout's if no library does.
    Raises LibraryError."""
    able = next((library for library in libraries if library.measures_limits), None)
    return able or library_of_checkout(None)


def machine(limits_by: Library) -> dict[str, Any]:
    """The CPU and its limits: GB/s of a stream and GFLOP/s of multiply-adds, each of one thread."""
    with limits_by.in_use():
        limits = {
            "read_gb_per_s": native.read_rate_gb_per_s(),
            "fma_gflop_per_s": native.fma_rate_gflop_per_s(),
        }
    return {
        "cpu": processor_name(),
        "kernels": native.kernel_names(),
        "torch": torch.__version__,
        **limits,
    }


def table(about: dict[str, Any], rows: Sequence[LinearRow | CallRow]) -> Iterator[str]:
    """Lines for a reader."""
    yield (
        f"{about['cpu']}: reads {about['read_gb_per_s']:.1f} GB/s, "
        f"{about['fma_gflop_per_s']:.1f} GFLOP/s of FMA"
    )
    yield (
        f"{'':26}{'rows':>5}{'context':>9}{'median':>16}{'of limit':>10}{'best':>7}{'x torch':>9}  "
        "library"
    )
    for row in rows:
        yield _linear_line(row) if isinstance(row, LinearRow) else _call_line(row)


def _linear_line(row: LinearRow) -> str:
    is_one = row.rows == 1
    rate = f"{row.weights_gb_per_s:.1f} GB/s" if is_one else f"{row.gflop_per_s:.1f} GFLOP/s"
    share = row.share_of_read if is_one else row.share_of_fma
    shares = f"{share or 0:>10.2f}{row.best_share or 0:>7.2f}" if share is not None else " " * 17
    ratio = f"{row.ratio_to_torch:>9.2f}" if row.ratio_to_torch is not None else " " * 9
    figures = f"{row.rows:>5}{'':>9}{rate:>16}{shares}{ratio}"
    return f"linear {row.scheme:<19}{figures}  {_origin(row)}".rstrip()


def _call_line(row: CallRow) -> str:
    time = f"{row.microseconds:.0f} us"
    context = row.context or ""
    return (
        f"{row.op:<26}{row.rows:>5}{context:>9}{time:>16}{'':17}{row.ratio_to_torch:>9.2f}  "
        f"{_origin(row)}"
    )


def _origin(row: LinearRow | CallRow) -> str:
    return f"{row.compiler} {row.kernels} {row.library}".strip()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench.kernels", description=__doc__.split("\n\n")[0])
    made.add_argument(
        "--quick", action="store_true", help="fewer row counts and rounds, about a minute"
    )
    made.add_argument(
        "--library",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="repeat to compare",
    )
    made.add_argument(
        "--kernels", metavar="NAME", help="the instruction set, such as avx2; default: the best one"
    )
    made.add_argument(
        "--rows", type=_integers, metavar="N,N,...", help="row counts of linear layers"
    )
    made.add_argument(
        "--schemes", type=_schemes, default=SCHEMES, metavar="NAME,...", help="of linear layers"
    )
    made.add_argument(
        "--copies", type=int, default=COPIES, metavar="N", help="copies of a block's matrices"
    )
    made.add_argument("--rounds", type=int, metavar="N", help="turns of each contender")
    made.add_argument("--linear", action="store_true", help="measure linear layers only")
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="file for the JSON")
    return made


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _schemes(text: str) -> tuple[Scheme, ...]:
    return tuple(Scheme.parse(word) for word in text.split(","))


def main() -> int:
    arguments = parser().parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    counts = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    try:
        libraries = libraries_of(arguments.library, arguments.kernels)
        limits_by = library_for_limits(libraries)
    except LibraryError as error:
        print(f"bench.kernels: {error}", file=sys.stderr)
        return 1
    with torch.inference_mode():
        about = machine(limits_by)
        matrices = Matrices(arguments.schemes, arguments.copies)
        measured: list[LinearRow | CallRow] = [
            *linear_rows(matrices, libraries, limits_by, counts, rounds)
        ]
        if not arguments.linear:
            measured += call_rows(libraries, limits_by, 5 * rounds)
            measured += chunk_rows(libraries, limits_by, rounds)
    text = json.dumps({"machine": about, "rows": [asdict(row) for row in measured]}, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if arguments.output or sys.stdout.isatty():
        print("\n".join(table(about, measured)))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
