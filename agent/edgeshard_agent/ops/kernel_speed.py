"""The speed of the native kernels compared with the limits of this machine, for one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from edgeshard.domain.nodes.kernels import KernelSpeed
from edgeshard_agent.ops import native, sources
from edgeshard_agent.ops.huge_pages import mapped
from edgeshard_agent.ops.linear import PackedForm, PackedLinear

_STREAM_BYTES = 64 << 20
_ROW_MATRIX, _ROWS_MATRIX = (8192, 4096), (1024, 512)
"""Outputs and inputs. The first matrix comes from memory, the second stays in a cache."""
_ROWS = 64
_TURNS = 5
"""The fastest counts: what else runs makes a turn slower."""
_PATTERN = 0x3C
"""Each byte of the weights; pages that were never written would share one of zeros."""

Clock = Callable[[], float]


@cache
def kernel_speed() -> KernelSpeed:
    """The speed as measured by the first call in this process, which takes about 0.2 s."""
    return measure_kernels()


def measure_kernels(clock: Clock = time.thread_time) -> KernelSpeed:
    """Measure the kernels in use; without them the value is that of torch's operators. `clock`
    returns seconds."""
    if not native.native_available():
        return KernelSpeed()
    row_bytes = 2 * _ROW_MATRIX[0] * _ROW_MATRIX[1]
    flops = 2 * _ROWS * _ROWS_MATRIX[0] * _ROWS_MATRIX[1]
    with _one_thread():
        row_s = _fastest(_ROW_MATRIX, 1, clock)
        rows_s = _fastest(_ROWS_MATRIX, _ROWS, clock)
    return KernelSpeed(
        name=native.kernel_names()[0],
        best_name=native.best_kernel_name(),
        compiler=" ".join(sources.kernel_set().split()[:2]),
        read_gb_per_s=native.read_rate_gb_per_s(_STREAM_BYTES),
        fma_gflop_per_s=native.fma_rate_gflop_per_s(),
        row_gb_per_s=row_bytes / row_s * 1e-9,
        rows_gflop_per_s=flops / rows_s * 1e-9,
    )


def _fastest(matrix: tuple[int, int], rows: int, clock: Clock) -> float:
    """Seconds of the fastest product of `rows` rows with a matrix [outputs, inputs] in bfloat16."""
    form = PackedForm("bf16", 0, *matrix)
    memory = mapped((form.size,), torch.uint8).fill_(_PATTERN)
    layer = PackedLinear.adopt(form, memory, None)
    inputs = torch.ones(rows, matrix[1], dtype=torch.bfloat16)
    seconds = []
    for _ in range(_TURNS):
        begin = clock()
        layer(inputs)
        seconds.append(clock() - begin)
    return max(min(seconds), 1e-9)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
