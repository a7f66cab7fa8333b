"""The tiny form of benchmarks, which tests run to see that they run: with EDGESHARD_BENCH_TINY=1 in
the environment.

Its figures mean nothing. Processes that a benchmark starts inherit it.
"""

from __future__ import annotations

import os
from typing import TypeVar

TINY = os.environ.get("EDGESHARD_BENCH_TINY") == "1"
_Size = TypeVar("_Size")


def sized(full: _Size, tiny: _Size) -> _Size:
    """The size to measure with, or the size of the tiny form."""
    return tiny if TINY else full
