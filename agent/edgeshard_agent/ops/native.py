"""The library of native kernels: found, loaded, and called by address.

It has a plain C interface and knows nothing of torch, so it outlives torch's upgrades.
`hatch_build.py` compiles it when EdgeShard is installed, for every instruction set of the machine's
family; which of them runs is decided when it is loaded. Set the environment variable
EDGESHARD_NATIVE_OPS to 0 to do without, and EDGESHARD_BF16_PRODUCTS to 0 to leave out the kernels
of AVX512-BF16.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

import numpy as np
import torch

from edgeshard_agent.ops import layouts, sources

LIBRARY = sources.LIBRARY
SWITCH = "EDGESHARD_NATIVE_OPS"
# The numbers of `Element` in kernels.h.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
INT4 = 2
# `NORM_...` of kernels.h.
NORM_PLAIN, NORM_UNIT_OFFSET, NORM_ROUNDED_LAST = range(3)
# `ACTIVATION_...` of kernels.h.
ACTIVATION_GELU, ACTIVATION_QUICK_GELU, ACTIVATION_SOFTCAP = range(3)
# `MOST_EXPERTS` of kernels.h.
MAX_EXPERTS = 1024

_NANOSECONDS = 1_000_000_000
_STREAM_BYTES = 128 << 20
"""More than the caches of the machines that people own."""

_log = logging.getLogger(__name__)


# `MOST_TAPS`, `MOST_KEY_DIM` and `MOST_STATE_DIM` of kernels.h.
MOST_TAPS = 8
MOST_KEY_DIM = 512
MOST_STATE_DIM = 512

# What `Sampled` has instead of a token; kernels.h says why.
NOT_FINITE, NOT_TAKEN = -1, -2


@cache
def library() -> ctypes.CDLL | None:
    """The library. None, after one warning, if it was not built, does not load or has other
    sources."""
    slow = "native kernels are not in use, so layers on the CPU run several times slower:"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        _log.warning(
            "%s %s. Install a C++ compiler (on Debian: g++) and install EdgeShard again.",
            slow,
            error,
        )
        return None
    try:
        for name, (result, arguments) in layouts.SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        is_ours = loaded.edgeshard_sources() == sources.digest().encode()
    except AttributeError:
        is_ours = False
    if not is_ours:  # its structs may be laid out otherwise
        _log.warning(
            "%s %s is of other sources; install EdgeShard again, or run hatch_build.py.",
            slow,
            LIBRARY.name,
        )
        return None
    names = sources.kernel_names(loaded)
    if not sources.is_allowed(names[0]):
        loaded.edgeshard_use_kernels(
            next(index for index, name in enumerate(names) if sources.is_allowed(name))
        )
    return loaded


def active() -> ctypes.CDLL | None:
    """The library where it is to be used, or None."""
    return None if os.environ.get(SWITCH) == "0" else library()


def native_available() -> bool:
    """Whether what is packed and called from now on runs in the native kernels."""
    return active() is not None


def kernel_names() -> tuple[str, ...]:
    """The kernels that this process may run on this CPU, the best (and default) first."""
    loaded = library()
    return () if loaded is None else tuple(filter(sources.is_allowed, sources.kernel_names(loaded)))


def best_kernel_name() -> str:
    """Name of the best instruction set that this CPU can run, compiled or not; "" without the
    native library."""
    loaded = library()
    name = None if loaded is None else loaded.edgeshard_cpu_kernels(0)
    return "" if name is None else name.decode()


def use_kernels(name: str) -> None:
    """Run the kernels of this name from now on, in the whole process; for tests and benchmarks."""
    loaded = library()
    assert loaded is not None
    loaded.edgeshard_use_kernels(sources.kernel_names(loaded).index(name))


def read_rate_gb_per_s(stream_bytes: int = _STREAM_BYTES) -> float:
    """GB/s at which one thread reads `stream_bytes` bytes of memory in order; 0.0 without the
    native library.

    It takes 0.1 to 0.3 s and returns 0.0 if the system has no memory for them.
    """
    loaded = active()
    if loaded is None:
        return 0.0
    rate: float = loaded.edgeshard_read_rate(stream_bytes)
    return rate


def fma_rate_gflop_per_s() -> float:
    """GFLOP/s of float32 multiply-adds of one thread, by the kernels in use; 0.0 without the native
    library.

    It takes about 0.03 s.
    """
    loaded = active()
    if loaded is None:
        return 0.0
    rate: float = loaded.edgeshard_fma_rate()
    return rate


def crc32c(data: memoryview) -> int | None:
    """CRC32C of contiguous bytes, not copied; None without the native library. Other threads run
    meanwhile."""
    loaded = active()
    if loaded is None:
        return None
    checksum: int = loaded.edgeshard_crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data))
    return checksum


def idle_spin(seconds: float, cores: int) -> None:
    """Keep so many cores from halting for so long from now on: between the steps of a generation.

    A node waits for the others for most of a token, which is too short to sleep. A core that halts
    then starts again with a lower clock and empty caches, and a virtual machine may lose it to
    another. So threads of the system's idle priority spin, and give way to everything else at once.
    Without the native library, or on a system that is not Linux, nothing happens.
    """
    loaded = active()
    if loaded is not None:
        loaded.edgeshard_idle_spin(cores, int(seconds * _NANOSECONDS))
